"""Quantizers by column, by tensor, and by row and column; those by row alone are in by_row.py.

An operand is read in 16 bits and written in 8 bits. The arithmetic costs nothing; the bytes decide the time.
How often must x be read?

    rows        once. A program holds whole rows, finds their amax and quantizes them.
    columns     twice. The amax of a column needs every row, and no element can be written before it is known.
    rows and columns of one matrix, as backward needs them of g: twice, for both together.

So all but the first run in two phases over tiles. The first phase reads x and reduces amaxes into one int32
per row and per column, by atomic maxima of the bits of |x| (deterministic, see formats.py). The second phase
reads x again, last tiles first, since these are still in the L2 cache, and writes each output in the layout
that its GEMM needs. Transposing costs nothing extra: the tile is transposed when it is written.

Rows that are longer than a program can hold are read twice as well.
On an H100 rows run at the speed of a copy, columns and both at 56 to 58 % of it (docs/gpu.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import (
    magnitude_bits,
    round_to,
    scale_from_amax,
    stochastic_round_to,
    uniform,
)
from lptune.numerics import FORMATS


class TileConfig(NamedTuple):
    """Launch parameters of the tile kernels. TILE_CONFIGS has only those that compile without spills."""

    block_m: int
    block_k: int
    num_warps: int


TILE_CONFIGS = (
    TileConfig(64, 64, 4),
    TileConfig(128, 64, 8),
    TileConfig(64, 128, 8),
    TileConfig(32, 128, 8),
    TileConfig(128, 32, 4),
)
NOT_SPECIALIZED = ["key", "first"]  # of random bits: new values in each step must not compile new kernels
TILES_PER_PROGRAM = 8  # tiles along the rows that a program of the first phase reduces before its atomics


@triton.jit
def amax_kernel(
    x_ptr,
    multiplier_k_ptr,
    multiplier_m_ptr,
    row_amax_ptr,
    column_amax_ptr,
    M,
    K,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLY_ROWS: tl.constexpr,
    MULTIPLY_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """First phase: amax bits of the rows of x * multiplier_k and of the columns of x * multiplier_m.

    ROWS: 0 no amax, 1 one for the whole tensor, 2 one per row. The outputs must be zeros at the start.
    """
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    if MULTIPLY_ROWS:
        multiplier_k = tl.load(multiplier_k_ptr + columns, mask=columns < K, other=0.0)[None, :]
    for tile in range(TILES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if ROWS == 2:
            folded = x * multiplier_k if MULTIPLY_ROWS else x
            row_amax = tl.max(magnitude_bits(folded), axis=1)
            tl.atomic_max(row_amax_ptr + rows, row_amax, mask=rows < M, sem="relaxed")
        if COLUMNS or ROWS == 1:
            if MULTIPLY_COLUMNS:
                x = x * tl.load(multiplier_m_ptr + rows, mask=rows < M, other=0.0)[:, None]
            bits = magnitude_bits(x)
            largest = tl.where(bits > largest, bits, largest)
    if COLUMNS:
        tl.atomic_max(column_amax_ptr + columns, tl.max(largest, axis=0), mask=columns < K, sem="relaxed")
    if ROWS == 1:
        tl.atomic_max(row_amax_ptr, tl.max(tl.max(largest, axis=1), axis=0), sem="relaxed")


@triton.jit
def round_either(
    scaled,
    at,
    key,
    first,
    STOCHASTIC: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
):
    """Rounds to nearest, or stochastically, by the bits of `key` for the elements from `first` on."""
    if STOCHASTIC:
        random = uniform(key.to(tl.int64), at + first)
        return stochastic_round_to(scaled, random, FORMAT, MAX, HARDWARE_FLOAT8)
    else:  # noqa: RET505
        return round_to(scaled, FORMAT, MAX, HARDWARE_FLOAT8)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def store_kernel(
    x_ptr,
    multiplier_k_ptr,
    multiplier_m_ptr,
    row_amax_ptr,
    column_amax_ptr,
    row_q_ptr,
    column_q_ptr,
    row_scale_ptr,
    column_scale_ptr,
    key,
    first,
    M,
    K,
    stride_m,
    stride_k,
    row_q_stride_m,
    row_q_stride_k,
    column_q_stride_m,
    column_q_stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLY_ROWS: tl.constexpr,
    MULTIPLY_COLUMNS: tl.constexpr,
    TWICE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Second phase: quantizes one tile by the amaxes of the first phase; each output has its own strides.

    TWICE: the row values are also stored in the place of the column values (COLUMNS is then off). STOCHASTIC:
    rounds by the random bits of `key`, for the elements from `first` on, which are not read otherwise.
    """
    # Last tiles first: the first phase has left them in the cache.
    tile_k = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    columns = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows64, columns64 = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + rows64 * stride_m + columns64 * stride_k, mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        folded = x
        if MULTIPLY_ROWS:
            folded = x * tl.load(multiplier_k_ptr + columns, mask=columns < K, other=0.0)[None, :]
        if ROWS == 2:
            amax_bits = tl.load(row_amax_ptr + rows, mask=rows < M, other=0)
        else:
            amax_bits = tl.load(row_amax_ptr + rows * 0)
        scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
        scaled = folded * inverse[:, None]
        q = round_either(scaled, rows64 * K + columns64, key, first, STOCHASTIC, FORMAT, MAX, HARDWARE_FLOAT8)
        tl.store(row_q_ptr + rows64 * row_q_stride_m + columns64 * row_q_stride_k, q, mask=inside)
        if TWICE:
            at = rows64 * column_q_stride_m + columns64 * column_q_stride_k
            tl.store(column_q_ptr + at, q, mask=inside)
        if tile_k == 0:
            tl.store(row_scale_ptr + rows, scale, mask=rows < (M if ROWS == 2 else 1))
    if COLUMNS:
        if MULTIPLY_COLUMNS:
            x = x * tl.load(multiplier_m_ptr + rows, mask=rows < M, other=0.0)[:, None]
        amax_bits = tl.load(column_amax_ptr + columns, mask=columns < K, other=0)
        scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
        scaled = x * inverse[None, :]
        q = round_either(scaled, rows64 * K + columns64, key, first, STOCHASTIC, FORMAT, MAX, HARDWARE_FLOAT8)
        tl.store(column_q_ptr + rows64 * column_q_stride_m + columns64 * column_q_stride_k, q, mask=inside)
        if tile_m == 0:
            tl.store(column_scale_ptr + columns, scale, mask=columns < K)


def quantize_columns(
    x_MK: Tensor, multiplier_M1: Tensor | None, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_columns` in two phases, so it reads x twice."""
    _, _, q, scale = in_two_phases(x_MK, fmt, power_of_two, 0, True, None, multiplier_M1, transposed)
    return q, scale


def quantize_rows_and_columns(
    x_MK: Tensor, multiplier_1K: Tensor | None, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lptune::quantize_rows_and_columns`: reads x twice, for both."""
    return in_two_phases(x_MK, fmt, power_of_two, 2, True, multiplier_1K, None, transposed)


def quantize_tensor(x_MK: Tensor, fmt: str, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_tensor` in two phases, so it reads x twice."""
    q, scale, _, _ = in_two_phases(x_MK, fmt, power_of_two, 1, False, None, None, transposed)
    return q, scale


def quantize_tensor_both_ways(x_MK: Tensor, fmt: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`lptune::quantize_tensor_both_ways`: reads x twice, for both."""
    q, scale, by_columns, _ = in_two_phases(x_MK, fmt, power_of_two, 1, False, None, None, True, twice=True)
    return q, by_columns, scale


def in_two_phases(
    x: Tensor,
    fmt: str,
    power_of_two: bool,
    rows: int,
    columns: bool,
    multiplier_1K: Tensor | None,
    multiplier_M1: Tensor | None,
    transposed: bool,
    twice: bool = False,
    random: tuple[int, int] | tuple[()] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row q, row scale, column q, column scale). transposed: for the columns, or for the rows if alone.

    rows: as ROWS of `amax_kernel`. twice: column q is a second copy of row q. random: key and first index of
    stochastic rounding; (): to nearest. Results that were not asked for are empty tensors.
    """
    (m, k), device = x.shape, x.device
    num_row_scales = (0, 1, m)[rows]
    # The amaxes of columns begin at an aligned address, for `again`.
    first_column = -(-num_row_scales // 4) * 4
    amaxes = torch.zeros(first_column + (k if columns else 0), dtype=torch.int32, device=device)
    row_amax, column_amax = amaxes[:num_row_scales], amaxes[first_column:]
    second = columns or twice
    row_q = empty_q(x, transposed and not second) if rows else amaxes[:0].view(torch.int8)
    column_q = empty_q(x, transposed) if second else amaxes[:0].view(torch.int8)
    row_scale = torch.empty(num_row_scales, 1, dtype=torch.float32, device=device)
    column_scale = torch.empty(1, column_amax.numel(), dtype=torch.float32, device=device)
    dtype = FORMATS[fmt].dtype
    if m == 0 or k == 0:
        return row_q.view(dtype), row_scale.zero_(), column_q.view(dtype), column_scale.zero_()

    multipliers = (vector(multiplier_1K, x), vector(multiplier_M1, x))
    tensors = (x, *multipliers, row_amax, column_amax, row_q, column_q, row_scale, column_scale)
    multiplied = multiplier_1K is not None, multiplier_M1 is not None
    options = (rows, columns, *multiplied, transposed, twice, bool(random), fmt, power_of_two)
    dtypes = (x.dtype, tensors[1].dtype, tensors[2].dtype)
    key = ("two phases", x.get_device(), m, k, *x.stride(), *dtypes, *options)
    if again.again(key, tensors, random):
        return row_q.view(dtype), row_scale, column_q.view(dtype), column_scale

    def launches(config: TileConfig) -> list[Launch]:
        """The first phase, which takes five of the tensors, and the second."""
        numbers, stochastic = (m, k, *x.stride()), bool(random)
        tiles_m, tiles_k = triton.cdiv(m, config.block_m), triton.cdiv(k, config.block_k)
        row_strides = row_q.stride() if rows else (0, 0)
        column_strides = column_q.stride() if second else (0, 0)
        flags = {"ROWS": rows, "COLUMNS": columns}
        flags |= {"MULTIPLY_ROWS": multiplied[0], "MULTIPLY_COLUMNS": multiplied[1]}
        form = launch.format_constants(fmt, device, power_of_two, twice)
        form |= {"TWICE": twice, "STOCHASTIC": stochastic}
        block = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
        amax, store = flags | {"TILES": TILES_PER_PROGRAM} | block, flags | form | block
        of_store = (*numbers, *row_strides, *column_strides)
        if not stochastic:
            of_store = (0, 0, *of_store)  # in the places of key and first
        grid = tiles_k, triton.cdiv(tiles_m, TILES_PER_PROGRAM)
        how = (store, config.num_warps)
        return [
            Launch(amax_kernel, grid, 5, numbers, amax, config.num_warps),
            Launch(store_kernel, (tiles_k, tiles_m), 9, of_store, *how, num_varying=2 * stochastic),
        ]

    # Measuring may run them twice: the amaxes of the same x stay the same.
    name = f"quantize rows={rows} columns={columns} twice={twice} transposed={transposed} {x.dtype} {fmt}"
    name += f" stochastic={bool(random)} column_major={x.stride(1) != 1} M~{launch.bucket(m)} K={k}"

    def run(config: TileConfig) -> None:
        for each in launches(config):
            each.run(tensors, random)

    config = launch.tuned(name, TILE_CONFIGS, run, device)
    again.first(key, launches(config), tensors, random)
    return row_q.view(dtype), row_scale, column_q.view(dtype), column_scale


def empty_q(x: Tensor, transposed: bool) -> Tensor:
    """Uninitialized int8 with the shape of x, stored row by row or, if transposed, column by column."""
    (m, k), device = x.shape, x.device
    if transposed:
        return torch.empty(k, m, dtype=torch.int8, device=device).t()
    return torch.empty(m, k, dtype=torch.int8, device=device)


def vector(multiplier: Tensor | None, x: Tensor) -> Tensor:
    """`multiplier` for a kernel. It needs a pointer argument, and does not read this one if there is none."""
    return x if multiplier is None else multiplier.contiguous()
