"""Which GEMMs are fast on this CPU, by its instruction sets.

All INT8 GEMMs of a CPU that lptune uses are exact, so speed alone decides (docs/benchmarks.md). Our own, if
it can be compiled, is about as fast as the fastest on each instruction set that it is written for. Without
VNNI, oneDNN's is a plain loop, 20 times slower than float32; with it, it is 9 times faster. Without bfloat16
instructions and AVX512, oneDNN's bfloat16 GEMM is up to 10 times slower than float32.
"""

import functools
import platform
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lptune.hardware.cpu import cpu_flags

_ONEDNN_NEEDS = {"avx512_vnni", "avx_vnni", "amx_int8"}
_BFLOAT16 = {"avx512f", "avx_ne_convert", "bf16"}  # the last one is ARM's


def int_mm_float32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` in int32, (M, N), by float32 GEMMs over slices that are short enough to be exact."""
    # 127 * 127 * 1024 < 2**24: float32 holds every partial sum of 1,024 products exactly.
    acc_MN = torch.zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.int32, device=a_MK.device)
    for start in range(0, a_MK.shape[1], 1024):
        part = slice(start, start + 1024)
        acc_MN += (a_MK[:, part].float() @ b_KN[part].float()).to(torch.int32)
    return acc_MN


def int_mm_is_fast() -> bool:
    """Whether torch's INT8 GEMM has instructions for it on this CPU, and is exact."""
    has_instructions = platform.machine() != "x86_64" or not cpu_flags().isdisjoint(_ONEDNN_NEEDS)
    return has_instructions and int_mm_is_exact()


def emulated_bfloat16(compute_dtype: str, device: torch.device) -> list[str]:
    """A note, if the CPU emulates the compute dtype and has a faster one."""
    flags = cpu_flags()
    if (compute_dtype, device.type) != ("bfloat16", "cpu") or not flags or flags & _BFLOAT16:
        return []
    return ["this CPU emulates bfloat16, up to ten times slower than float32; set compute_dtype=float32"]


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether torch's INT8 GEMM is exact on this CPU.

    Without VNNI, oneDNN sums pairs of products in int16. 2 * 127 * 127 overflows there: the sum saturates
    silently, an error of up to a fifth of a layer's output. Any operands at full scale show it.
    """

    def is_exact() -> bool:
        a = torch.full((64, 256), 127, dtype=torch.int8)
        a[::2] = -127
        return torch.equal(torch._int_mm(a, a.t()).long(), (a.double() @ a.t().double()).long())

    # In a thread of its own the caller's modes do not count: fake tensors, a default device.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(is_exact).result()
