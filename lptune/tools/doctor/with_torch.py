"""Probes that import torch: GPUs, GEMMs, kinds, collectives, torch.compile. They run in a child process.

Which kind to begin with: an 8-bit GEMM saves arithmetic, and quantizing its operands costs memory traffic,
so a kind pays if its GEMM is clearly faster than that of bfloat16. What counts at last is the model's own
layers, which `lptune advise` times.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lptune.base.text import printable, size_text
from lptune.config import PRECISION_KINDS
from lptune.hardware.devices import FLOAT8_CAPABILITY, known_device
from lptune.tools.doctor.line import NOTE, OK, PROBLEM, Line, Probe

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
            what = "weights stored in INT8, GEMMs in the compute dtype; saves memory, not time"
            if PRECISION_KINDS[kind].for_servers:
                what = "weights rounded to 4 bits for INT4 servers, GEMMs in the compute dtype"
            text = f"runs anywhere: {what}"
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


_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 and with lptune's kernels
_MEASURED_S = 1.0
"""Duration of the measurement of all GEMMs."""


def probes(*, measure: bool) -> list[tuple[str, Probe]]:
    """(section, probe), in the order in which they run; what may end the process comes last."""
    speeds: dict[str, Speed] = {}
    supports: dict[str, Support] = {}

    def published_speeds() -> Iterator[Line]:
        speeds.update(published())
        yield from ()

    def measured_speeds() -> Iterator[Line]:
        # Kernels for GPUs are tuned at the first step of a run, which takes long. Without tuning, a GEMM in 8
        # bits would look slower than it is. So the published peaks stay, and bf16 shows the GPU's health.
        if (peak := speeds.get("bf16")) is not None:
            yield health(measured(formats=("bf16",))["bf16"], peak)
        else:
            speeds.update(measured())

    def kinds() -> Iterator[Line]:
        supports.update({kind: support(kind, device_type()) for kind in all_kinds()})
        yield from kind_lines(supports, speeds)
        kind, reason = recommended(supports, speeds, device_name())
        yield Line("recommendation", kind, OK, reason)

    measuring = [("kinds", measured_speeds)] if measure else []
    return [
        ("GPUs", gpus),
        ("GPUs", topology),
        ("kinds", native_library),
        ("kinds", published_speeds),
        *measuring,
        ("kinds", kinds),
        ("collectives", nccl),
        ("collectives", gloo),
        ("compilation", compilation),
    ]


def device_type() -> str:
    """Type of the device where `device: auto` runs: cuda or cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Name of the device where `device: auto` runs."""
    import torch

    return torch.cuda.get_device_name(0) if device_type() == "cuda" else "this CPU"


def gpus() -> Iterator[Line]:
    """Each GPU with memory, compute capability and what is published of it."""
    import torch

    build = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    if not torch.cuda.is_available():
        yield from _no_gpu(build)
        return
    yield Line("GPUs", "torch", OK, f"{torch.__version__}, CUDA {build}{_driver()}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _no_gpu(build: str | None) -> Iterator[Line]:
    import torch

    if _DRIVER.exists():
        why = (
            "torch is a build for CPUs" if build is None else f"CUDA {build} of torch cannot use this driver"
        )
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            why = "CUDA_VISIBLE_DEVICES hides them"
        todo = (
            "unset CUDA_VISIBLE_DEVICES"
            if "hides" in why
            else "install the build of torch for the driver's CUDA"
        )
        yield Line("GPUs", "driver", PROBLEM, f"there is an NVIDIA driver, and no GPU for torch: {why}", todo)
        return
    yield Line("GPUs", "torch", OK, f"{torch.__version__}{f', CUDA {build}' if build else ', for CPUs'}")
    yield Line(
        "GPUs", "gpu", OK, "none: `device: auto` runs on the CPU, which is for trials and small models"
    )


def _gpu(index: int) -> Line:
    import torch

    about = torch.cuda.get_device_properties(index)
    capability = (about.major, about.minor)
    free, total = torch.cuda.mem_get_info(index)
    text = (
        f"{about.name}, {size_text(total)} ({size_text(free)} free), compute capability "
        f"{about.major}.{about.minor}"
    )
    if capability < _OLDEST_CAPABILITY:
        return Line(
            "GPUs", f"gpu {index}", PROBLEM, text, "lptune needs Ampere (8.0) or newer; set device=cpu"
        )
    known = known_device(about.name)
    if known is None:
        return Line("GPUs", f"gpu {index}", NOTE, f"{text}; its peaks are not known here, so runs log no mfu")
    if free < 0.8 * total:
        return Line("GPUs", f"gpu {index}", NOTE, text, "another program uses it: see nvidia-smi")
    float8 = (
        "float8 GEMMs" if capability >= FLOAT8_CAPABILITY else "no float8 GEMMs (Ada and newer have them)"
    )
    return Line("GPUs", f"gpu {index}", OK, f"{text}, {float8}")


def _driver() -> str:
    if not _DRIVER.exists():
        return ""
    words = _DRIVER.read_text(errors="replace").split()
    numbers = [word for word in words if word[0].isdigit() and word.count(".") >= 1]
    return f", driver {numbers[0]}" if numbers else ""


def topology() -> Iterator[Line]:
    """Whether GPUs reach each other's memory."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    text = f"{direct} of {len(pairs)} pairs reach each other's memory directly"
    if direct == len(pairs):
        yield Line("GPUs", "topology", OK, text)
    else:
        todo = "keep parallel.tensor within GPUs that do; all-gathers go through host memory"
        yield Line("GPUs", "topology", NOTE, text, todo)


def native_library() -> Iterator[Line]:
    """lptune's own C++ for CPUs: built once with the machine's compiler."""
    from lptune.kernels import native

    if not native.available():
        todo = "install g++, see that TMPDIR can be written: INT8 on this CPU is then several times faster"
        yield Line("kinds", "lptune's C++", NOTE, "could not be built; torch's own operations are used", todo)
    else:
        found = native.instruction_set()
        gemm = f"with the INT8 GEMM for {found}" if found else "quantizers; no INT8 GEMM for this processor"
        yield Line("kinds", "lptune's C++", OK, f"built, {gemm}")


def published() -> dict[str, Speed]:
    """Published dense peaks of the first GPU; empty for others and for a CPU."""
    known = known_device(device_name()) if device_type() == "cuda" else None
    peaks = {fmt: known.peak(fmt) for fmt in ("bf16", "int8", "e4m3")} if known else {}
    return {fmt: Speed(peak, is_measured=False) for fmt, peak in peaks.items() if peak is not None}


def health(speed: Speed, peak: Speed) -> Line:
    """Whether bf16 GEMMs are about as fast as this device allows. Less than 40 % of the peak is a note: with
    large matrices a GPU that is neither throttled nor shared should have more (docs/gpu.md assumes 71 %).
    """
    share = speed.flops / peak.flops
    text = f"{speed}, {share:.0%} of the published peak"
    todo = "see nvidia-smi -q -d PERFORMANCE: clocks, power, temperature, other programs"
    return Line("kinds", "bf16 GEMM", OK if share >= 0.4 else NOTE, text, "" if share >= 0.4 else todo)


def measured(formats: Sequence[str] = ("bf16", "float32", "int8", "e4m3")) -> dict[str, Speed]:
    """FLOP/s of one GEMM in each of the formats that the device has, with the kernels of a run.

    The formats take turns, and the fastest call of each counts: another program on the machine slows down
    single calls.
    """
    import torch

    from lptune.kernels import choose_backend, layer_handle, scaled_mm

    device = torch.device(device_type())
    tokens, width = (4096, 4096) if device.type == "cuda" else (512, 2048)
    x = torch.randn(tokens, width, device=device).bfloat16()
    w = torch.randn(width, width, device=device).bfloat16()
    scales = torch.ones(tokens, 1, device=device), torch.ones(1, width, device=device)
    gemms: dict[str, Callable[[], object]] = {"bf16": lambda: x @ w.t()}
    if "float32" in formats and device.type == "cpu":  # faster than bfloat16 that is emulated
        wide_x, wide_w = x.float(), w.float()
        gemms["float32"] = lambda: wide_x @ wide_w.t()
    low = {"int8": ("int8_gemm", torch.int8), "e4m3": ("float8_gemm", torch.float8_e4m3fn)}
    for fmt, (operation, dtype) in low.items():
        if fmt in formats and choose_backend(operation, device.type) != "reference":
            operands = (x * 8).to(dtype), (w * 8).to(dtype).t(), *scales
            gemms[fmt] = partial(scaled_mm, *operands, torch.bfloat16, layer_handle(-1), 0)
    durations = {fmt: [_duration(gemm) for _ in range(2)] for fmt, gemm in gemms.items()}  # warm
    end = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < end:
        for fmt, gemm in gemms.items():
            durations[fmt].append(_duration(gemm))
    num_flops = 2 * tokens * width * width
    return {fmt: Speed(num_flops / min(each), is_measured=True) for fmt, each in durations.items()}


def _duration(gemm: Callable[[], object]) -> float:
    import torch

    begin = time.perf_counter()
    gemm()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def nccl() -> Iterator[Line]:
    """The version of NCCL, on a machine with GPUs."""
    import torch

    if torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Line("collectives", "NCCL", OK, version)


def gloo() -> Iterator[Line]:
    """A process group of one rank by gloo, over the loopback device as in a run on one machine."""
    import torch
    import torch.distributed as dist

    from lptune.launch import flags

    flags.stay_on_loopback()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=10)
    )
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=10))
    try:
        total = torch.ones(2)
        dist.all_reduce(total)
    finally:
        dist.destroy_process_group()
    assert total.tolist() == [1.0, 1.0]
    yield Line(
        "collectives", "gloo", OK, f"works over {os.environ.get('GLOO_SOCKET_IFNAME', 'its own choice')}"
    )


def compilation() -> Iterator[Line]:
    """torch.compile of a small function, with an empty cache, on the device of a run."""
    import torch

    device = torch.device(device_type())
    how = "Triton" if device.type == "cuda" else "the C++ compiler"
    with tempfile.TemporaryDirectory(prefix="lptune-doctor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # of this child: what is cached would prove nothing
        os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # they pay after several kernels
        begin = time.perf_counter()
        x = torch.arange(64.0, device=device)
        try:
            found = float(torch.compile(lambda x: (2 * x + 1).sum())(x))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            text = printable(f"does not work by {how}: {type(error).__name__}: {first:.200}")
            todo = "see the lines on compiler and TMPDIR, or set compile=none: slower steps"
            yield Line("compilation", "torch.compile", PROBLEM, text, todo)
            return
        duration = time.perf_counter() - begin
    if found != 64 * 64:
        text = f"a compiled sum is {found}, and must be {64 * 64}"
        yield Line("compilation", "torch.compile", PROBLEM, text, "set compile=none")
        return
    text = f"works by {how}: {duration:.1f} s for a small function, imports included"
    yield Line("compilation", "torch.compile", OK, text)
