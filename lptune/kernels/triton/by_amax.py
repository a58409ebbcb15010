"""Quantizers by an amax that is known before x is read, so that x is read once.

    by_amax     rows of a larger matrix, by the amaxes of all of it: weights and tokens that ranks gather
    delayed     by the largest amax of past steps; the same pass measures the amax of this step

A tile is loaded, rounded to the compute dtype in registers, quantized, and stored row by row, column by
column, or both. With one amax for each square block, a tile lies in one column of blocks. Each of its rows
then has one scale, wherever a shard begins inside a block. The programs also write the scales of all amaxes,
in turn: a separate launch would take longer than this work.

Whether a layer has an amax of the past is known to the device alone. Delayed scaling therefore launches three
kernels: the first measures x and ends at once if there is a past, the second quantizes and measures, and the
third writes one scale and one amax.

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune import numerics
from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import (
    INFINITY_BITS,
    magnitude_bits,
    round_input,
    round_to,
    scale_from_amax,
)
from lptune.kernels.triton.quantize import TILE_CONFIGS, TILES_PER_PROGRAM, TileConfig, empty_q
from lptune.numerics import FORMATS

_SCALES_AT_ONCE = 128


@triton.jit
def known_amax_kernel(
    x_ptr,
    amax_ptr,
    measured_ptr,
    scale_ptr,
    current_ptr,
    q_ptr,
    second_q_ptr,
    M,
    K,
    stride_m,
    stride_k,
    q_stride_m,
    q_stride_k,
    second_q_stride_m,
    second_q_stride_k,
    first_row,
    block_columns,
    num_amaxes,
    SIDE: tl.constexpr,
    DELAYED: tl.constexpr,
    TWICE: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Quantizes one tile of x. ROUNDED_TO: as for `round_input`. TWICE: q is stored again, in other strides.

    SIDE: 0: one amax. Else the side of the blocks with one amax each, row by row, `block_columns` in a row;
    x begins in row `first_row` of the matrix of the blocks.
    DELAYED: `amax` is of the past; 0 stands for none, and the amax in `measured` is taken. The amax of the
    tile goes to `measured`. Otherwise inf becomes NaN in float8: an amax of the past does not show it. And
    the scales of all `num_amaxes` amaxes are written, SCALES by a program at once.
    """
    if not DELAYED:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        programs = tl.num_programs(0) * tl.num_programs(1)
        for start in range(program * SCALES, num_amaxes, programs * SCALES):
            one = start + tl.arange(0, SCALES)
            bits = magnitude_bits(tl.load(amax_ptr + one, mask=one < num_amaxes, other=0.0))
            scale, _ = scale_from_amax(bits, MAX, POWER_OF_TWO)
            tl.store(scale_ptr + one, scale, mask=one < num_amaxes)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (columns < K)[None, :]
    if SIDE:
        # A tile has columns of one block: the last tile of a block may be narrower.
        TILES: tl.constexpr = (SIDE + BLOCK_K - 1) // BLOCK_K
        block_column = tl.program_id(0) // TILES
        within = tl.program_id(0) % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
        columns = block_column * SIDE + within
        inside = ((columns < K) & (within < SIDE))[None, :]
    inside &= (rows < M)[:, None]
    rows64, columns64 = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    x = tl.load(x_ptr + rows64 * stride_m + columns64 * stride_k, mask=inside, other=0.0).to(tl.float32)
    x = round_input(x, ROUNDED_TO)
    if SIDE:
        at = ((rows + first_row) // SIDE).to(tl.int64) * block_columns + block_column
        amax_bits = magnitude_bits(tl.load(amax_ptr + at, mask=rows < M, other=0.0))
    else:
        amax_bits = magnitude_bits(tl.load(amax_ptr + rows * 0))
    if DELAYED:
        amax_bits = tl.where(amax_bits > 0, amax_bits, tl.load(measured_ptr))
        largest = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
        # `measured` only grows. Few tiles raise it: without the test thousands of programs would queue there.
        tl.atomic_max(measured_ptr, largest, mask=largest > tl.load(measured_ptr), sem="relaxed")
    _, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
    scaled = x * inverse[:, None]
    if FORMAT != "int8" and not DELAYED:
        scaled = tl.where(magnitude_bits(x) == INFINITY_BITS, float("nan"), scaled)
    q = round_to(scaled, FORMAT, MAX, HARDWARE_FLOAT8)
    tl.store(q_ptr + rows64 * q_stride_m + columns64 * q_stride_k, q, mask=inside)
    if TWICE:
        at_second = rows64 * second_q_stride_m + columns64 * second_q_stride_k
        tl.store(second_q_ptr + at_second, q, mask=inside)


@triton.jit
def amax_without_past_kernel(
    x_ptr,
    past_ptr,
    measured_ptr,
    M,
    K,
    stride_m,
    stride_k,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Measures the amax of x, unless there is one of the past."""
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    tiles = tl.where(tl.load(past_ptr) > 0, 0, TILES)
    for tile in range(tiles):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
        bits = magnitude_bits(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
        largest = tl.where(bits > largest, bits, largest)
    tl.atomic_max(measured_ptr, tl.max(tl.max(largest, axis=1), axis=0), sem="relaxed")


@triton.jit
def delayed_scale_kernel(
    x_ptr,
    past_ptr,
    measured_ptr,
    scale_ptr,
    current_ptr,
    HAS_CURRENT: tl.constexpr,
    REPLACE: tl.constexpr,
    MAX: tl.constexpr,
):
    """The scale by which x was quantized: NaN if x is not finite. The amax of x goes to `current`.

    x is not read. REPLACE: `current` becomes the amax; otherwise the larger of both.
    """
    measured = tl.load(measured_ptr)
    past_bits = magnitude_bits(tl.load(past_ptr))
    scale, _ = scale_from_amax(tl.where(past_bits > 0, past_bits, measured), MAX, False)
    tl.store(scale_ptr, tl.where(measured < INFINITY_BITS, scale, float("nan")))
    if HAS_CURRENT:
        current = magnitude_bits(tl.load(current_ptr))
        larger = measured if REPLACE else tl.where(measured > current, measured, current)
        tl.store(current_ptr, larger.to(tl.float32, bitcast=True))


@triton.jit
def block_amax_kernel(
    x_ptr,
    amax_ptr,
    M,
    K,
    stride_m,
    stride_k,
    above,
    SIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The amax of the elements of x in one block. BLOCK_K: at least SIDE. above: the row of the first block
    in which x begins.
    """
    first = tl.program_id(1) * SIDE - above
    within = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * SIDE + within
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for start in range(0, SIDE, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        rows = first + row
        inside = ((row < SIDE) & (rows >= 0) & (rows < M))[:, None]
        inside &= ((within < SIDE) & (columns < K))[None, :]
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
        bits = magnitude_bits(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
        largest = tl.where(bits > largest, bits, largest)
    amax = tl.max(tl.max(largest, axis=1), axis=0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), amax)


def quantize_by_amax(
    x_MK: Tensor,
    amax: Tensor,
    fmt: str,
    power_of_two: bool,
    block: int | None,
    first_row: int,
    rounded_to: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_by_amax`: one kernel, which reads x once, for all of its arguments."""
    amax, q = amax.contiguous(), empty_q(x_MK, False)
    if x_MK.numel() == 0:  # a rank without rows has the scales nevertheless
        scale, _ = numerics.scale_from_amax(amax, FORMATS[fmt], power_of_two)
        return q.view(FORMATS[fmt].dtype), scale
    scale = torch.empty(amax.shape, dtype=torch.float32, device=amax.device)
    tensors = (x_MK, amax, None, scale, None, q, None)
    _quantize(tensors, fmt, power_of_two, block, first_row, rounded_to)
    return q.view(FORMATS[fmt].dtype), scale


def quantize_delayed(
    x_MK: Tensor,
    past: Tensor,
    current: Tensor | None,
    fmt: str,
    replace: bool,
    transposed: bool,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale (1, 1), q again) by the amax `past`, or by its own if that is 0; reads x once, or twice.

    past, current: float32, one element. `current` becomes the amax of x, or with `replace` False the larger
    of both. transposed: q is stored column by column. twice: q is stored row by row, and again by columns.
    """
    device, dtype = x_MK.device, FORMATS[fmt].dtype
    measured = torch.zeros((), dtype=torch.int32, device=device)
    scale = torch.empty(1, 1, dtype=torch.float32, device=device)
    q = empty_q(x_MK, transposed and not twice)
    second_q = empty_q(x_MK, True) if twice else None
    tensors = (x_MK, past, measured, scale, current, q, second_q)
    _quantize(tensors, fmt, replace=replace)
    return q.view(dtype), scale, (q[:0] if second_q is None else second_q).view(dtype)


_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]


def _quantize(
    tensors: _Tensors,
    fmt: str,
    power_of_two: bool = False,
    block: int | None = None,
    first_row: int = 0,
    rounded_to: torch.dtype | None = None,
    replace: bool = False,
) -> None:
    """tensors: x, amax, measured, scale, current, q, and q again; delayed scaling if there is `measured`."""
    x, amax, measured, _, current, q, second_q = tensors
    (m, k), second_strides = x.shape, (0, 0) if second_q is None else second_q.stride()
    options = (measured is None, current is None, second_q is None, fmt, power_of_two, replace)
    key = ("by amax", x.get_device(), m, k, *x.stride(), x.dtype, *q.stride(), *second_strides, amax.numel())
    key = (*key, block, first_row, rounded_to, *options)
    if again.again(key, tensors):
        return

    def launch_by(config: TileConfig) -> Launch:
        side, twice = block or 0, second_q is not None
        tiles = triton.cdiv(side or k, config.block_k) * (triton.cdiv(k, side) if side else 1)
        blocks = (first_row, triton.cdiv(k, side or k), amax.numel())
        constants = launch.format_constants(fmt, x.device, power_of_two, twice) | {
            "SIDE": side,
            "DELAYED": measured is not None,
            "TWICE": twice,
            "ROUNDED_TO": launch.rounding_of_input(x, rounded_to),
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "SCALES": _SCALES_AT_ONCE,
        }
        grid = tiles, triton.cdiv(m, config.block_m)
        numbers = (m, k, *x.stride(), *q.stride(), *second_strides, *blocks)
        return Launch(known_amax_kernel, grid, 7, numbers, constants, config.num_warps)

    launches = []
    if m > 0 and k > 0:
        # Measuring runs it several times: the amax of the same x stays the same.
        name = f"by_amax block={block} delayed={measured is not None} twice={second_q is not None}"
        name += f" transposed={q.stride(1) != 1} {x.dtype} {fmt} column_major={x.stride(1) != 1}"
        name += f" M~{launch.bucket(m)} K={k}"
        config = launch.tuned(name, TILE_CONFIGS, lambda each: launch_by(each).run(tensors), x.device)
        launches = [launch_by(config)]
        if measured is not None:
            launches.insert(0, _amax_without_past(x))
    if measured is not None:
        last = {"HAS_CURRENT": current is not None, "REPLACE": replace, "MAX": FORMATS[fmt].max}
        launches.append(Launch(delayed_scale_kernel, (1,), 5, (), last, num_warps=4))
    again.first(key, launches, tensors)


def _amax_without_past(x: Tensor) -> Launch:
    (m, k), config = x.shape, TILE_CONFIGS[0]
    rows = config.block_m * TILES_PER_PROGRAM
    constants = {"TILES": TILES_PER_PROGRAM, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
    grid = triton.cdiv(k, config.block_k), triton.cdiv(m, rows)
    return Launch(amax_without_past_kernel, grid, 3, (m, k, *x.stride()), constants, config.num_warps)


def block_amaxes(x_MK: Tensor, block: int, above: int) -> Tensor:
    """`lptune::block_amaxes`: reads x once. x_MK: not empty."""
    m, k = x_MK.shape
    shape = -(-(above + m) // block), -(-k // block)  # rounded up; triton.cdiv takes four microseconds
    amax = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    numbers, tensors = (m, k, *x_MK.stride(), above), (x_MK, amax)
    key = ("block amaxes", x_MK.get_device(), *numbers, x_MK.dtype, block)
    if not again.again(key, tensors):
        constants = {"SIDE": block, "BLOCK_M": 32, "BLOCK_K": triton.next_power_of_2(block)}
        made = Launch(block_amax_kernel, shape[::-1], 2, numbers, constants, num_warps=4)
        again.first(key, [made], tensors)
    return amax
