"""Which GEMMs are fast on this CPU: by its instruction sets, and by a timing where they do not tell.

All INT8 GEMMs of a CPU that lptune uses are exact, so speed alone decides, and it cannot be guessed. Without
VNNI, oneDNN's INT8 GEMM is a plain loop, 20 times slower than float32; with it, it is 9 times faster. Our own
GEMM for AVX2 is twice as fast as float32 where a processor multiplies integers on two ports, and no faster
where on one. Without bfloat16 instructions, oneDNN's bfloat16 GEMM is up to 10 times slower than float32.

A timing takes some tens of ms. It is kept in the folder of `lptune.base.cache`, under a name that depends
on the processor, on torch and on our C++; to time again, delete its gemms-*.json. Ranks that start together
may choose differently, with the same bits.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from lptune.base import cache
from lptune.base.files import parse_json
from lptune.hardware.cpu import cpu_flags, cpuinfo
from lptune.kernels import native
from lptune.kernels.native import library

logger = logging.getLogger(__name__)

_SIZE = 512
_ROUNDS = 4
_CLEARLY_SLOWER = 1.3
"""Below it a timing may err, and bfloat16 halves the memory traffic."""
_ONEDNN_NEEDS = {"avx512_vnni", "avx_vnni", "amx_int8"}
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that take instruction sets from torch's GEMMs."""


def int_mm_float32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` in int32, (M, N), by float32 GEMMs over slices that are short enough to be exact."""
    # 127 * 127 * 1024 < 2**24: float32 holds every partial sum of 1,024 products exactly.
    acc_MN = torch.zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.int32, device=a_MK.device)
    for start in range(0, a_MK.shape[1], 1024):
        part = slice(start, start + 1024)
        acc_MN += (a_MK[:, part].float() @ b_KN[part].float()).to(torch.int32)
    return acc_MN


@functools.cache
def fastest_int8_gemm() -> str:
    """The backend of INT8 GEMMs that is fastest on this CPU: native, torch or float32."""
    if native.instruction_set() == "amx":
        return "native"  # oneDNN's is no faster, and its scales need a second pass over memory
    seconds = {name: each for name, each in gemm_seconds().items() if name in ("native", "torch", "float32")}
    return min(seconds, key=seconds.__getitem__)


@functools.cache
def bfloat16_slowdown() -> float | None:
    """How many times as long as a float32 GEMM a bfloat16 GEMM takes, on a CPU that has no instructions for
    bfloat16; None on others.
    """
    if cpu_flags() & _BFLOAT16 and not any(map(os.environ.get, LIMITS)):
        return None
    seconds = gemm_seconds()
    return seconds["bfloat16 matmul"] / seconds["float32 matmul"]


def emulated_bfloat16(compute_dtype: str, device: torch.device) -> list[str]:
    """A note, if the CPU emulates the compute dtype and has a faster one."""
    slowdown = bfloat16_slowdown() if (compute_dtype, device.type) == ("bfloat16", "cpu") else None
    if slowdown is None or slowdown < _CLEARLY_SLOWER:
        return []
    return [
        f"this CPU emulates bfloat16, and its float32 GEMMs are {slowdown:.1f}x as fast; "
        "compute_dtype=float32 uses them"
    ]


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether torch's INT8 GEMM is exact on this CPU.

    Without VNNI, oneDNN sums pairs of products in int16. 2 * 127 * 127 overflows there: the sum saturates
    silently, an error of up to a fifth of a layer's output. Any operands at full scale show it.
    """
    a = torch.full((64, 256), 127, dtype=torch.int8)
    a[::2] = -127
    return torch.equal(torch._int_mm(a, a.t()).long(), (a.double() @ a.t().double()).long())


def _gemms() -> dict[str, Callable[[], object]]:
    """What is timed: INT8 GEMMs with scales, by backend, and plain matmuls of the two compute dtypes."""
    # A generator of its own: a run's random numbers must not depend on what is timed.
    x = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    scale = torch.ones(_SIZE, 1, dtype=torch.float32)
    a = (x * 30).to(torch.int8)
    b = a.t()

    def scaled(acc: Tensor) -> Tensor:
        if native.available():
            return native.apply_scales(acc, scale, scale.t(), torch.float32)
        return acc.float() * scale * scale.t()

    low = x.bfloat16()
    gemms: dict[str, Callable[[], object]] = {
        "float32 matmul": lambda: x @ x.t(),
        "bfloat16 matmul": lambda: low @ low.t(),
        "float32": lambda: scaled(int_mm_float32(a, b)),
    }
    if native.instruction_set():
        gemms["native"] = lambda: native.int8_mm(a, b, scale, scale.t(), torch.float32)
    # Without VNNI it is a plain loop on x86, which takes longer than all others together.
    if (platform.machine() != "x86_64" or cpu_flags() & _ONEDNN_NEEDS) and int_mm_is_exact():
        gemms["torch"] = lambda: scaled(torch._int_mm(a, b))
    return gemms


@functools.cache
def gemm_seconds() -> dict[str, float]:
    """Name of each GEMM of `_gemms` -> seconds of its fastest call, kept from process to process."""
    processor = cpuinfo().get("model name", platform.machine())
    own = native.instruction_set() and library.source_digest()
    parts = (processor, sorted(cpu_flags()), torch.__version__, native.instruction_set(), own, _SIZE)
    identity = repr((parts, [os.environ.get(name) for name in LIMITS]))
    path = cache.folder() / f"gemms-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        kept: dict[str, float] = parse_json(cache.read(path) or b"{}")["seconds"]
        logger.info("GEMMs of %s timed before: %s", processor, path)
        return kept
    # In a thread of its own the caller's modes do not count: fake tensors, a default device, inference.
    with ThreadPoolExecutor(1) as pool:
        seconds = pool.submit(time_gemms, torch.get_num_threads()).result()
    with suppress(OSError):
        cache.write(path, json.dumps({"processor": processor, "seconds": seconds}, indent=1).encode())
    logger.info("GEMMs of %s timed: %s", processor, seconds)
    return seconds


def time_gemms(num_threads: int) -> dict[str, float]:
    """The GEMMs take turns, so that other load meets all of them, and the fastest call of each counts. One
    thread: several that share a core with another program wait for each other longer than any GEMM takes.
    """
    torch.set_num_threads(1)
    try:
        gemms = _gemms()
        seconds = dict.fromkeys(gemms, float("inf"))
        for _ in range(_ROUNDS):
            for name, gemm in gemms.items():
                begin = time.perf_counter()
                gemm()
                seconds[name] = min(seconds[name], time.perf_counter() - begin)
    finally:
        torch.set_num_threads(num_threads)  # threads that start later get what was set last
    return seconds
