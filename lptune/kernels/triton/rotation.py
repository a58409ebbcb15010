"""The rotation by Hadamard blocks (lptune/numerics/rotation.py): of a row that a program holds (`rotate_row`,
for by_row.py), and as a pass of its own, which rotates the results of GEMMs back.

In a pass of its own, a tile is one block of some rows and stays in registers: x is read once and written
once. A quantizer that cannot rotate what it holds (it stores columns, or K is no multiple of 128) makes such
a pass before, in float32.

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import round_input
from lptune.numerics import rotation_runs

BLOCK_M, NUM_WARPS = 32, 4
FACTOR_128 = tl.constexpr(128**-0.5)


@triton.jit
def rotate_kernel(
    x_ptr,
    out_ptr,
    M,
    START,
    stride_m,
    stride_k,
    out_stride_m,
    out_stride_k,
    ROUNDED_TO: tl.constexpr,
    ROUNDED_OUT: tl.constexpr,
    FACTOR: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rotates the blocks of BLOCK_K = 2**PASSES columns from column START on."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = START + tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows64, columns64 = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    mask = (rows < M)[:, None]
    x = tl.load(x_ptr + rows64 * stride_m + columns64 * stride_k, mask=mask, other=0.0).to(tl.float32)
    x = round_input(x, ROUNDED_TO)
    for i in tl.static_range(PASSES):
        x = _butterflies(x, 1 << i, BLOCK_M, BLOCK_K)
    x = round_input(x * FACTOR, ROUNDED_OUT)
    tl.store(out_ptr + rows64 * out_stride_m + columns64 * out_stride_k, x, mask=mask)


@triton.jit
def rotate_row(x, BLOCK_K: tl.constexpr):
    """Rotates the blocks of 128 of a row that a program holds, float32 (BLOCK_K,)."""
    x = tl.reshape(x, (BLOCK_K // 128, 128))
    for i in tl.static_range(7):
        x = _butterflies(x, 1 << i, BLOCK_K // 128, 128)
    return tl.reshape(x * FACTOR_128, (BLOCK_K,))


@triton.jit
def _butterflies(x, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(a + b, a - b) of the elements a and b of a row that are HALF apart."""
    pairs = tl.permute(tl.reshape(x, (BLOCK_M, BLOCK_K // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (BLOCK_M, BLOCK_K))


def rotate(x_MK: Tensor, rounded_to: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """`numerics.rotate(x_MK)`, rounded once to `dtype`. rounded_to: x_MK is rounded to it first."""
    x, out = x_MK, torch.empty(x_MK.shape, dtype=dtype, device=x_MK.device)
    if not x.numel():
        return out
    numbers = (*x.stride(), *out.stride())
    key = ("rotate", x.get_device(), *x.shape, *numbers, x.dtype, rounded_to, dtype)
    if not again.again(key, (x, out)):
        rounded_out = launch.rounding_of_input(x.new_empty(0, dtype=torch.float32), dtype)
        launches = []
        for start, block, count in rotation_runs(x.shape[1]):
            constants = {
                "ROUNDED_TO": launch.rounding_of_input(x, rounded_to),
                "ROUNDED_OUT": rounded_out,
                "FACTOR": block**-0.5,
                "PASSES": block.bit_length() - 1,
                "BLOCK_M": BLOCK_M,
                "BLOCK_K": block,
            }
            grid = (count, triton.cdiv(x.shape[0], BLOCK_M))
            sizes = (x.shape[0], start, *numbers)
            launches.append(Launch(rotate_kernel, grid, 2, sizes, constants, NUM_WARPS))
        again.first(key, launches, (x, out))
    return out
