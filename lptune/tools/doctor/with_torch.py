"""Probes that import torch: GPUs, GEMMs, kinds, collectives, torch.compile. They run in a child process.

Which kind pays is no question of the machine alone: what decides are the model's layers and what 8 bits cost
its loss, which `lptune advise` measures.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from lptune.base.text import printable, size_text
from lptune.config import PRECISION_KINDS
from lptune.hardware.devices import FLOAT8_CAPABILITY, known_device
from lptune.tools.doctor.line import NOTE, OK, PROBLEM, Line, Probe

_BACKENDS = {"triton": "lptune's Triton kernels", "float32": "exact float32 GEMMs"}
_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 and with lptune's kernels
_MEASURED_S = 1.0
"""Duration of the measurement of a GEMM."""


def probes() -> list[tuple[str, Probe]]:
    """(section, probe), in the order in which they run; what may end the process comes last."""
    return [
        ("GPUs", gpus),
        ("GPUs", topology),
        ("GPUs", speed),
        ("kinds", native_library),
        ("kinds", kinds),
        ("collectives", nccl),
        ("collectives", gloo),
        ("compilation", compilation),
    ]


def device_type() -> str:
    """Type of the device where `device: auto` runs: cuda or cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


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


def kinds() -> Iterator[Line]:
    """A line for each kind, and one for all that do not run here. Raises UserError for variables that are
    wrong.
    """
    import torch

    from lptune.kernels import backend_text, choose_backend, emulated_bfloat16
    from lptune.linear import KINDS

    where = device_type()
    slow = emulated_bfloat16("bfloat16", torch.device(where))
    yield Line("kinds", "none", NOTE if slow else OK, "; ".join(["bf16 everywhere", *slow]))
    absent = []
    for name, kind in KINDS.items():
        if not kind.operations:
            what = "weights stored in INT8, GEMMs in the compute dtype; saves memory, not time"
            if PRECISION_KINDS[name].for_servers:
                what = "weights rounded to 4 bits for INT4 servers, GEMMs in the compute dtype"
            yield Line("kinds", name, OK, f"runs anywhere: {what}")
        elif choose_backend(kind.operations[0], where) != "reference":
            backend = backend_text(kind.operations[0], where)
            by = _BACKENDS.get(backend, backend.replace("native", "lptune's C++"))
            yield Line("kinds", name, OK, f"native, by {by}")
        elif kind.emulated_where_missing:
            yield Line("kinds", name, OK, "emulated in wider arithmetic: the same numbers, slower than bf16")
        else:
            absent.append(name)
    if absent:
        todo = "precision.emulate=true runs them, slowly"
        yield Line("kinds", "others", NOTE, f"no 8-bit GEMM here for {', '.join(absent)}", todo)


def speed() -> Iterator[Line]:
    """Whether bf16 GEMMs are about as fast as the first GPU allows, where its peak is published. Less than
    40 % of that is a note: with large matrices a GPU that is neither throttled nor shared should have more
    (docs/gpu.md assumes 71 %).
    """
    import torch

    known = known_device(torch.cuda.get_device_name(0)) if device_type() == "cuda" else None
    if known is None:
        return
    flops = _bf16_flops()
    share = flops / known.bf16
    text = f"{flops / 1e12:,.0f} TFLOP/s, {share:.0%} of the published peak"
    todo = "see nvidia-smi -q -d PERFORMANCE: clocks, power, temperature, other programs"
    yield Line("GPUs", "bf16 GEMM", OK if share >= 0.4 else NOTE, text, "" if share >= 0.4 else todo)


def _bf16_flops() -> float:
    """FLOP/s of a GEMM on the first GPU. The fastest call counts: other programs slow down single calls."""
    import torch

    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    durations, end = list[float](), time.perf_counter() + _MEASURED_S
    while len(durations) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        x @ x
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - begin)
    return 2 * 4096**3 / min(durations)


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
