"""Quantizers with one scale per block.

The amax of a block needs only the elements of the block, so every quantizer here reads x once. Blocks are
rows 1 x 128, columns 128 x 1, squares 128 x 128, and for MX 1 x 32 and 32 x 1 with E8M0 scales. A tile
consists of whole blocks and is kept in registers. Backward needs g in row and column blocks; one tile gives
both.

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import magnitude_bits, round_to, scale_from_amax
from lptune.kernels.triton.quantize import empty_q
from lptune.numerics import FORMATS


class BlockTile(NamedTuple):
    """Launch parameters of the quantizer: a tile of whole blocks."""

    block_m: int
    block_k: int
    num_warps: int


def block_tile(rows: int, columns: int) -> BlockTile:
    """The tile for blocks of rows x columns (powers of two up to 128): 32 elements a thread."""
    block_m = max(rows, 32)
    block_k = max(columns, 4096 // block_m)
    return BlockTile(block_m, block_k, block_m * block_k // 1024)


def square_tile(size: int) -> BlockTile:
    """The tile for both `size` x 1 and 1 x `size`. At 32 a thread has half as many elements, since two
    results spilled.
    """
    tile = block_tile(size, size)
    return tile._replace(num_warps=max(tile.num_warps, 8))


@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    other_q_ptr,
    other_scale_ptr,
    M,
    K,
    stride_m,
    stride_k,
    q_stride_m,
    q_stride_k,
    other_q_stride_m,
    other_q_stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOTH: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Reads one tile of x; quantizes it in blocks of ROWS x COLUMNS, and if BOTH also in blocks of COLUMNS x
    ROWS. Scales are stored row by row; with POWER_OF_TWO in E8M0.
    """
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    # Elements beyond the end are zeros, which do not change an amax.
    x = tl.load(x_ptr + at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0).to(tl.float32)
    _store_blocks(
        x, q_ptr, scale_ptr, M, K, q_stride_m, q_stride_k, ROWS, COLUMNS, FORMAT, MAX, POWER_OF_TWO,
        HARDWARE_FLOAT8, BLOCK_M, BLOCK_K
    )  # fmt: skip
    if BOTH:
        _store_blocks(
            x, other_q_ptr, other_scale_ptr, M, K, other_q_stride_m, other_q_stride_k, COLUMNS, ROWS, FORMAT,
            MAX, POWER_OF_TWO, HARDWARE_FLOAT8, BLOCK_M, BLOCK_K
        )  # fmt: skip


@triton.jit
def _store_blocks(
    x,
    q_ptr,
    scale_ptr,
    M,
    K,
    q_stride_m,
    q_stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantizes this program's tile x in blocks of ROWS x COLUMNS."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    blocks = tl.reshape(x, (BLOCK_M // ROWS, ROWS, BLOCK_K // COLUMNS, COLUMNS))
    amax_bits = tl.max(tl.max(magnitude_bits(blocks), axis=3), axis=1)
    scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
    q = round_to(blocks * inverse[:, None, :, None], FORMAT, MAX, HARDWARE_FLOAT8)
    at = rows.to(tl.int64)[:, None] * q_stride_m + columns.to(tl.int64)[None, :] * q_stride_k
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    tl.store(q_ptr + at, tl.reshape(q, (BLOCK_M, BLOCK_K)), mask=inside)

    block_rows = tl.program_id(1) * (BLOCK_M // ROWS) + tl.arange(0, BLOCK_M // ROWS)
    block_columns = tl.program_id(0) * (BLOCK_K // COLUMNS) + tl.arange(0, BLOCK_K // COLUMNS)
    num_rows, num_columns = tl.cdiv(M, ROWS), tl.cdiv(K, COLUMNS)
    if POWER_OF_TWO:  # E8M0: the exponent bits; those of NaN are 0xff, its NaN (numerics.to_e8m0)
        scale = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
    tl.store(
        scale_ptr + block_rows.to(tl.int64)[:, None] * num_columns + block_columns[None, :],
        scale,
        mask=(block_rows < num_rows)[:, None] & (block_columns < num_columns)[None, :],
    )


def quantize_blocks(
    x_MK: Tensor, block: tuple[int, int], fmt: str, e8m0: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_blocks`: reads x once, and keeps a tile of whole blocks in registers."""
    (found,) = _quantize(x_MK, block, fmt, e8m0, [transposed])
    return found


def quantize_row_and_column_blocks(
    x_MK: Tensor, size: int, fmt: str, e8m0: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lptune::quantize_row_and_column_blocks`: reads x once, for both."""
    rows, columns = _quantize(x_MK, (1, size), fmt, e8m0, [False, transposed])
    return *rows, *columns


def _quantize(
    x_MK: Tensor, block: tuple[int, int], fmt: str, e8m0: bool, transposed: list[bool]
) -> list[tuple[Tensor, Tensor]]:
    """(q, scale) for each of `transposed`, which says how q is stored: by blocks of rows x columns, then by
    blocks of columns x rows.
    """
    (m, k), (rows, columns) = x_MK.shape, block
    blocks = ((rows, columns), (columns, rows))
    made = [
        (empty_q(x_MK, each), _empty_scale(x_MK, of, e8m0))
        for of, each in zip(blocks, transposed, strict=False)
    ]
    if m > 0 and k > 0:
        both, tensors = len(made) > 1, (x_MK, *made[0], *made[-1])
        numbers = (m, k, *x_MK.stride(), *made[0][0].stride(), *made[-1][0].stride())
        key = ("blocks", x_MK.get_device(), *numbers, x_MK.dtype, rows, columns, both, fmt, e8m0)
        if not again.again(key, tensors):
            tile = square_tile(columns) if both else block_tile(rows, columns)
            constants = launch.format_constants(fmt, x_MK.device, power_of_two=e8m0)
            constants |= {"ROWS": rows, "COLUMNS": columns, "BOTH": both}
            constants |= {"BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k}
            grid = triton.cdiv(k, tile.block_k), triton.cdiv(m, tile.block_m)
            first = Launch(quantize_blocks_kernel, grid, 5, numbers, constants, tile.num_warps)
            again.first(key, [first], tensors)
    dtype = FORMATS[fmt].dtype
    return [(q.view(dtype), scale.view(torch.float8_e8m0fnu) if e8m0 else scale) for q, scale in made]


def _empty_scale(x_MK: Tensor, block: tuple[int, int], e8m0: bool) -> Tensor:
    # Rounded up; triton.cdiv takes four microseconds.
    shape = [-(-size // of) for size, of in zip(x_MK.shape, block, strict=True)]
    return torch.empty(shape, dtype=torch.uint8 if e8m0 else torch.float32, device=x_MK.device)
