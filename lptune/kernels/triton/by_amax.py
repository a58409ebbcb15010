"""The quantizer of some rows of a larger matrix, whose amaxes are known: x is read once.

Such rows are a rank's part of a weight, or of x (weight_amax.py): ranks have agreed on the amax of the whole
matrix, or on one for each of its square blocks. A program takes a tile that lies in one column of blocks, so
each of its rows has one scale. The first rows of x may lie inside a block.

The scales of the whole matrix are a result, too. The programs share them out; few are as many as the tiles.

Not run on hardware yet: interpreted, and compiled ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import INFINITY_BITS, magnitude_bits, round_to, scale_from_amax
from lptune.kernels.triton.quantize import empty_q
from lptune.numerics import FORMATS

TILE = 4096  # elements: 32 in each of 128 threads
WIDEST, NARROWEST = 128, 16  # columns of a tile


@triton.jit
def by_amax_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    scale_ptr,
    M,
    K,
    stride_m,
    stride_k,
    first_row,
    num_scales,
    blocks_in_row,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantizes one tile. SIZE: side of the blocks, a multiple of BLOCK_K; 0: one amax for all."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    rows64 = rows.to(tl.int64)
    at = rows64[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SIZE == 0:
        block = rows64 * 0
    else:
        block = (first_row + rows64) // SIZE * blocks_in_row + tl.program_id(0) * BLOCK_K // SIZE
    amax_bits = magnitude_bits(tl.load(amax_ptr + block, mask=rows < M, other=0.0))
    _row_scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
    scaled = x * inverse[:, None]
    if FORMAT != "int8":  # an amax of past steps does not show an inf, which would saturate
        scaled = tl.where(magnitude_bits(x) == INFINITY_BITS, float("nan"), scaled)
    q = round_to(scaled, FORMAT, MAX, HARDWARE_FLOAT8)
    tl.store(q_ptr + rows64[:, None] * K + columns[None, :], q, mask=inside)

    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    stride = tl.num_programs(0) * tl.num_programs(1) * BLOCK_K
    for start in range(program * BLOCK_K, num_scales, stride):
        mine = start + tl.arange(0, BLOCK_K)
        bits = magnitude_bits(tl.load(amax_ptr + mine, mask=mine < num_scales, other=0.0))
        scale, _unused = scale_from_amax(bits, MAX, POWER_OF_TWO)
        tl.store(scale_ptr + mine, scale, mask=mine < num_scales)


def has_tile(block: int | None) -> bool:
    """Whether a tile lies in one column of blocks of this side; None: one block."""
    return block is None or (block >= NARROWEST and block & (block - 1) == 0)


def quantize_by_amax(
    x_MK: Tensor, amax: Tensor, fmt: str, power_of_two: bool, block: int | None, first_row: int
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_by_amax`. x_MK: not empty. block: one that `has_tile` allows."""
    (m, k), amax = x_MK.shape, amax.contiguous()
    q, scale = empty_q(x_MK, False), torch.empty_like(amax)
    tensors = (x_MK, amax, q, scale)
    numbers = (m, k, *x_MK.stride(), first_row, amax.numel(), amax.shape[1])
    key = ("by amax", x_MK.get_device(), *numbers, x_MK.dtype, fmt, power_of_two, block)
    if not again.again(key, tensors):
        block_k = min(block or WIDEST, WIDEST)
        block_m = TILE // block_k
        constants = {
            "SIZE": block or 0,
            "FORMAT": launch.rounding(fmt),
            "MAX": FORMATS[fmt].max,
            "POWER_OF_TWO": power_of_two,
            "HARDWARE_FLOAT8": launch.rounds_float8(x_MK.device),
            "BLOCK_M": block_m,
            "BLOCK_K": block_k,
        }
        grid = triton.cdiv(k, block_k), triton.cdiv(m, block_m)
        made = Launch(by_amax_kernel, grid, len(tensors), numbers, constants, num_warps=4)
        again.first(key, [made], tensors)
    return q.view(FORMATS[fmt].dtype), scale
