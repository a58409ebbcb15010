"""Which kinds of precision run on this machine, how fast their GEMMs are, and which one to begin with.

An 8-bit GEMM saves arithmetic, and quantizing its operands costs memory traffic: a kind pays if its GEMM is
clearly faster than that of bfloat16. What counts at last is the model's own layers, which `lptune advise`
times.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lptune.config import PRECISION_KINDS
from lptune.tools.doctor.line import NOTE, OK, Line

FASTER = 1.3
"""An 8-bit GEMM must be this many times as fast as the fastest one in high precision. Quantizers take
about 15 % of the time of the 8-bit layers that they feed (docs/gpu.md, predicted for 3B), and a part of a
step has no 8-bit GEMM at all."""
_FORMATS = {"int8": "int8", "e4m3": "float8"}
_BACKENDS = {"triton": "lptune's Triton kernels", "float32": "exact float32 GEMMs"}


class Speed(NamedTuple):
    """The speed of a GEMM on this device."""

    flops: float
    """FLOP/s (INT8: operations/s)."""
    is_measured: bool
    """Measured here; False: the published peak of the device."""

    def __str__(self) -> str:
        tera = self.flops / 1e12
        num_digits = 2 if tera < 1 else 1 if tera < 10 else 0
        return f"{tera:,.{num_digits}f} TFLOP/s {'measured' if self.is_measured else 'published'}"


class Support(NamedTuple):
    """How a kind runs on a device."""

    kind: str
    how: str
    """native | emulated (by itself) | absent (only with precision.emulate=true) | compute (no 8-bit GEMM)."""
    fmt: str
    """int8 | e4m3: format of x and W."""
    backend: str
    """What runs its GEMM: triton, torch, native, …; or the reason why nothing does."""


def support(kind: str, device_type: str) -> Support:
    """How `kind` runs on the device of this process. Raises UserError for variables that are wrong."""
    from lptune.kernels import backend_text, choose_backend
    from lptune.linear.kind import KINDS

    entry = KINDS[kind]
    if not entry.operations:
        return Support(kind, "compute", entry.fmt, "")
    backend = choose_backend(entry.operations[0], device_type)
    if backend != "reference":
        return Support(kind, "native", entry.fmt, backend_text(entry.operations[0], device_type))
    return Support(kind, "emulated" if entry.emulated_where_missing else "absent", entry.fmt, backend)


def kind_lines(supports: Mapping[str, Support], speeds: Mapping[str, Speed]) -> Iterator[Line]:
    """A line for each kind, and one for all that do not run here. speeds: of GEMMs in `bf16`, `int8` and
    `e4m3`, as far as known.
    """
    high, wide = speeds.get("bf16"), speeds.get("float32")
    text = f"bf16 everywhere; GEMMs {high}" if high else "bf16 everywhere"
    if high and wide and wide.flops >= FASTER * high.flops:
        text += f", float32's {wide}, {wide.flops / high.flops:.1f}x bf16"
        yield Line("kinds", "none", NOTE, text, "set compute_dtype=float32 on this CPU")
    else:
        yield Line("kinds", "none", OK, text)
    absent = []
    for kind, found in supports.items():
        if found.how == "compute":
            text = "runs anywhere: weights stored in INT8, GEMMs in the compute dtype; saves memory, not time"
            yield Line("kinds", kind, OK, text)
        elif found.how == "native":
            speed = speeds.get(found.fmt)
            ratio = f", {speed.flops / high.flops:.1f}x bf16" if speed and high else ""
            ratio += f", {speed.flops / wide.flops:.1f}x float32" if speed and wide else ""
            rate = f"; {_FORMATS[found.fmt]} GEMMs {speed}{ratio}" if speed else ""
            yield Line("kinds", kind, OK, f"native, by {_backend(found.backend)}{rate}")
        elif found.how == "emulated":
            yield Line("kinds", kind, OK, "emulated in wider arithmetic: the same numbers, slower than bf16")
        else:
            absent.append(kind)
    if absent:
        todo = "precision.emulate=true runs them, slowly"
        yield Line("kinds", "others", NOTE, f"no 8-bit GEMM here for {', '.join(absent)}", todo)


def _backend(name: str) -> str:
    return _BACKENDS.get(name, name.replace("native", "lptune's C++"))


def recommended(supports: Mapping[str, Support], speeds: Mapping[str, Speed], device: str) -> tuple[str, str]:
    """(kind, reason): the kind to begin with on this device.

    Of the formats with a GEMM that is FASTER times as fast as bfloat16 (on a CPU: or float32, whichever is
    faster), the fastest; INT8 where float8 is not 5 % faster, since its scales of rows and columns are the
    finest at full rate. supports: of all kinds.
    """
    highs = {fmt: speeds[fmt] for fmt in ("bf16", "float32") if fmt in speeds}
    fastest = max(highs, key=lambda fmt: highs[fmt].flops, default="bf16")
    high, found = highs.get(fastest), {}
    for kind, fmt in (("int8_rowcol", "int8"), ("float8_tensorwise", "e4m3")):
        if kind in supports and supports[kind].how == "native":
            speed = speeds.get(fmt)
            known = speed is not None and high is not None and not math.isnan(speed.flops / high.flops)
            found[kind] = speed.flops / high.flops if known and speed and high else None
    if not found:
        return "none", f"{device} has no 8-bit GEMM that lptune uses, so {fastest} is fastest"
    ratios = {kind: ratio for kind, ratio in found.items() if ratio is not None}
    if not ratios:
        return next(iter(found)), f"its GEMM is native on {device}; how fast it is, is not known"
    best = max(ratios, key=lambda kind: ratios[kind] * (1.05 if kind == "int8_rowcol" else 1))
    fmt = "int8" if best == "int8_rowcol" else "e4m3"
    how = "measured" if speeds[fmt].is_measured else "published"
    rate = f"{_FORMATS[fmt]} GEMMs are {ratios[best]:.1f}x as fast as {fastest} on {device} ({how})"
    if ratios[best] < FASTER:
        return "none", f"{rate}, too little to pay for quantizing"
    return best, rate


def all_kinds() -> list[str]:
    """The kinds other than `none`."""
    return [kind for kind in PRECISION_KINDS if kind != "none"]
