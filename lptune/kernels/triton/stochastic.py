"""Quantizers that round stochastically, with the random bits of `numerics.uniform`.

The bits of an element are a hash of a key and of the element's index. So a program computes the bits of its
elements in registers, by a few integer operations each, and needs no other program. Plain torch keeps each
step of the hash in memory, as int64: 660 bytes for each element where one pass over x moves 3.

    rows      x is read once, by programs that hold whole rows
    columns   x is read twice: the first phase finds the amaxes (quantize.py), the second one rounds
    tensor    as for columns

Weights that are stored in INT8 are rounded here too, by rows, after each update (training/chunked_adamw.py).
An update may have to be dropped, which only the device knows: the kernel then stores the values from before.

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.by_row import LONGEST_HELD_ROW, rows_num_warps
from lptune.kernels.triton.formats import magnitude_bits, round_to, scale_from_amax
from lptune.kernels.triton.quantize import TILE_CONFIGS, TILES_PER_PROGRAM, TileConfig, amax_kernel, empty_q
from lptune.numerics import FORMATS

_NOT_SPECIALIZED = ["key", "first"]  # new values in each step must not compile new kernels


@triton.jit
def _mix(h):
    """A bijection of uint32, as in `numerics.rounding`."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def uniform(key, index):
    """`numerics.uniform` in float32. key, index: int64."""
    low = _mix(key.to(tl.uint32) ^ index.to(tl.uint32))
    high = _mix(low ^ (key >> 32).to(tl.uint32) ^ (index >> 32).to(tl.uint32))
    return (high >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8  # 2**-24


@triton.jit
def _floor(x32):
    """The floor of numbers that fit an int32. Triton's own takes subnormal numbers for zeros."""
    truncated = x32.to(tl.int32).to(tl.float32)
    return tl.where(truncated > x32, truncated - 1.0, truncated)


@triton.jit
def stochastic_round_to(
    scaled, random, FORMAT: tl.constexpr, MAX: tl.constexpr, HARDWARE_FLOAT8: tl.constexpr
):
    """`numerics.stochastic_round_to` of finite values, as int8 bits. FORMAT, MAX: as for `round_to`."""
    if FORMAT == "int8":
        below = _floor(scaled)
        rounded = below + tl.where(random < scaled - below, 1.0, 0.0)
    else:
        # The step of the format at `scaled` is a power of two: exact to divide by, and to multiply with.
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
        SMALLEST: tl.constexpr = 127 - (6 if FORMAT == "e4m3" else 14)
        exponent = (scaled.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.where(exponent < SMALLEST, SMALLEST, exponent) - MANTISSA
        step = (exponent << 23).to(tl.float32, bitcast=True)
        steps = scaled * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        below = _floor(steps)
        rounded = (below + tl.where(random < steps - below, 1.0, 0.0)) * step
    return round_to(rounded, FORMAT, MAX, HARDWARE_FLOAT8)


@triton.jit
def _load(x_ptr, multiplier_ptr, at, K, MULTIPLY: tl.constexpr):
    """The elements `at` of a row in float32, times the multiplier."""
    x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    return x * tl.load(multiplier_ptr + at, mask=at < K, other=0.0) if MULTIPLY else x


@triton.jit
def _round_and_store(
    scaled,
    at,
    row,
    q_ptr,
    q_before_ptr,
    found_inf_ptr,
    key,
    first,
    K,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    MAY_SKIP: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
):
    """Rounds the elements `at` of row `row` of a matrix that is stored row by row."""
    random = uniform(key.to(tl.int64), row * K + at + first)
    q = stochastic_round_to(scaled, random, FORMAT, MAX, HARDWARE_FLOAT8)
    if MAY_SKIP:
        skips = tl.load(found_inf_ptr) == 1.0
        before = tl.load(q_before_ptr + row * K + at, mask=at < tl.where(skips, K, 0), other=0)
        q = tl.where(skips, before, q)
    tl.store(q_ptr + row * K + at, q, mask=at < K)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def stochastic_rows_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    q_before_ptr,
    scale_before_ptr,
    found_inf_ptr,
    key,
    first,
    K,
    stride_m,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MULTIPLY: tl.constexpr,
    MAY_SKIP: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
):
    """Quantizes one row. x: (M, K), stride 1 along K; q: row by row. HELD: the row fits a block.

    MAY_SKIP: where `found_inf` is 1, the results are q_before and scale_before.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_m
    columns = tl.arange(0, BLOCK_K)
    if HELD:
        x = _load(x_ptr, multiplier_ptr, columns, K, MULTIPLY)
        scale, inverse = scale_from_amax(tl.max(magnitude_bits(x), axis=0), MAX, POWER_OF_TWO)
        _round_and_store(
            x * inverse, columns, row, q_ptr, q_before_ptr, found_inf_ptr, key, first, K, FORMAT, MAX,
            MAY_SKIP, HARDWARE_FLOAT8
        )  # fmt: skip
    else:
        largest = tl.zeros((BLOCK_K,), tl.int32)
        for start in range(0, K, BLOCK_K):
            bits = magnitude_bits(_load(x_ptr, multiplier_ptr, start + columns, K, MULTIPLY))
            largest = tl.where(bits > largest, bits, largest)
        scale, inverse = scale_from_amax(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
        for start in range(0, K, BLOCK_K):
            at = start + columns
            _round_and_store(
                _load(x_ptr, multiplier_ptr, at, K, MULTIPLY) * inverse, at, row, q_ptr, q_before_ptr,
                found_inf_ptr, key, first, K, FORMAT, MAX, MAY_SKIP, HARDWARE_FLOAT8
            )  # fmt: skip
    if MAY_SKIP:
        scale = tl.where(tl.load(found_inf_ptr) == 1.0, tl.load(scale_before_ptr + row), scale)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def stochastic_tiles_kernel(
    x_ptr,
    multiplier_k_ptr,
    multiplier_m_ptr,
    row_amax_ptr,
    column_amax_ptr,
    q_ptr,
    second_q_ptr,
    scale_ptr,
    key,
    first,
    M,
    K,
    stride_m,
    stride_k,
    q_stride_m,
    q_stride_k,
    second_q_stride_m,
    second_q_stride_k,
    DIM: tl.constexpr,
    MULTIPLY: tl.constexpr,
    TWICE: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Second phase: quantizes one tile by the amaxes of the first phase (`amax_kernel`).

    DIM: what has an amax: 1 a row, 0 a column, 2 the tensor, in row_amax. Rows are multiplied by
    multiplier_k, the others by multiplier_m. TWICE: q is stored again, with other strides.
    """
    # Last tiles first: the first phase has left them in the cache.
    tile_k = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    columns = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows64, columns64 = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + rows64 * stride_m + columns64 * stride_k, mask=inside, other=0.0).to(tl.float32)
    if DIM == 1:
        if MULTIPLY:
            x = x * tl.load(multiplier_k_ptr + columns, mask=columns < K, other=0.0)[None, :]
        amax_bits = tl.load(row_amax_ptr + rows, mask=rows < M, other=0)
        scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
        scaled = x * inverse[:, None]
        if tile_k == 0:
            tl.store(scale_ptr + rows, scale, mask=rows < M)
    else:
        if MULTIPLY:
            x = x * tl.load(multiplier_m_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if DIM == 0:
            amax_bits = tl.load(column_amax_ptr + columns, mask=columns < K, other=0)
        else:
            amax_bits = tl.load(row_amax_ptr + columns * 0)
        scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
        scaled = x * inverse[None, :]
        if tile_m == 0:
            tl.store(scale_ptr + columns, scale, mask=columns < (K if DIM == 0 else 1))
    random = uniform(key.to(tl.int64), rows64 * K + columns64 + first)
    q = stochastic_round_to(scaled, random, FORMAT, MAX, HARDWARE_FLOAT8)
    tl.store(q_ptr + rows64 * q_stride_m + columns64 * q_stride_k, q, mask=inside)
    if TWICE:
        at = rows64 * second_q_stride_m + columns64 * second_q_stride_k
        tl.store(second_q_ptr + at, q, mask=inside)


def quantize_rows_stochastic(
    x_MK: Tensor,
    multiplier_1K: Tensor | None,
    fmt: str,
    power_of_two: bool,
    key: int,
    first: int,
    before: tuple[Tensor, Tensor] | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of `x * multiplier`, by one pass over x, which is stored row by row. key, first: as for
    `quantize_stochastic` in lptune.kernels.

    before: q and scale that are the results where `found_inf`, float32 with one element, is 1.
    """
    (m, k), device = x_MK.shape, x_MK.device
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    q, scale = empty_q(x_MK, False), torch.empty(m, 1, dtype=torch.float32, device=device)
    if m == 0 or k == 0:
        return q.view(FORMATS[fmt].dtype), scale.zero_()
    # A kernel needs pointer arguments; it does not read those that stand in for None.
    q_before, scale_before = (q, scale) if before is None else (each.contiguous() for each in before)
    may_skip = before is not None and found_inf is not None
    multiplier = x_MK if multiplier_1K is None else multiplier_1K.contiguous()
    found_inf = scale if found_inf is None else found_inf
    tensors = (x_MK, multiplier, q, scale, q_before, scale_before, found_inf)
    options = (multiplier_1K is not None, may_skip, fmt, power_of_two)
    numbers = (k, x_MK.stride(0))
    dtypes = (x_MK.dtype, multiplier.dtype, q_before.dtype)
    launch_key = ("stochastic rows", x_MK.get_device(), m, *numbers, *dtypes, *options)
    if not again.again(launch_key, tensors, (key, first)):
        held = k <= LONGEST_HELD_ROW
        block_k = triton.next_power_of_2(k) if held else 4096
        constants = {
            "FORMAT": launch.rounding(fmt),
            "MAX": FORMATS[fmt].max,
            "POWER_OF_TWO": power_of_two,
            "MULTIPLY": multiplier_1K is not None,
            "MAY_SKIP": may_skip,
            "HARDWARE_FLOAT8": launch.rounds_float8(device),
            "BLOCK_K": block_k,
            "HELD": held,
        }
        num_warps = rows_num_warps(block_k)
        made = Launch(stochastic_rows_kernel, (m,), 7, numbers, constants, num_warps, num_varying=2)
        again.first(launch_key, [made], tensors, (key, first))
    return q.view(FORMATS[fmt].dtype), scale


def quantize_stochastic(
    x_MK: Tensor,
    multiplier: Tensor | None,
    fmt: str,
    power_of_two: bool,
    dim: int,
    key: int,
    first: int,
    transposed: bool,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, q again). dim, key, first: as for `quantize_stochastic` in lptune.kernels.

    transposed: q is stored column by column. twice: q is stored row by row, and q again column by column;
    else the last result is empty.
    """
    if dim == 1 and not transposed and not twice and x_MK.stride(1) == 1:
        q, scale = quantize_rows_stochastic(x_MK, multiplier, fmt, power_of_two, key, first)
        return q, scale, q[:0]
    (m, k), device, dtype = x_MK.shape, x_MK.device, FORMATS[fmt].dtype
    shape = {0: (1, k), 1: (m, 1), 2: (1, 1)}[dim]
    amax = torch.zeros(shape, dtype=torch.int32, device=device)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    q = empty_q(x_MK, transposed and not twice)
    second_q = empty_q(x_MK, True) if twice else q[:0]
    if m == 0 or k == 0:
        return q.view(dtype), scale.zero_(), second_q.view(dtype)
    # As above, for the second multiplier and the second amaxes too.
    vector = x_MK if multiplier is None else multiplier.contiguous()
    tensors = (x_MK, vector, vector, amax, amax, q, second_q, scale)
    options = (dim, multiplier is not None, transposed, twice, fmt, power_of_two)
    launch_key = (
        "stochastic tiles",
        x_MK.get_device(),
        m,
        k,
        *x_MK.stride(),
        x_MK.dtype,
        vector.dtype,
        *options,
    )
    if not again.again(launch_key, tensors, (key, first)):
        phases = _TwoPhases(dim, multiplier is not None, twice, fmt, power_of_two, tensors)
        name = f"stochastic dim={dim} twice={twice} transposed={transposed} {x_MK.dtype} {fmt}"
        name += f" column_major={x_MK.stride(1) != 1} M~{launch.bucket(m)} K={k}"

        def run(config: TileConfig) -> None:
            for each in phases.launches(config):
                each.run(tensors, (key, first))

        config = launch.tuned(name, TILE_CONFIGS, run, device)
        again.first(launch_key, phases.launches(config), tensors, (key, first))
    return q.view(dtype), scale, second_q.view(dtype)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def bfloat16_kernel(x_ptr, out_ptr, key, first, N, BLOCK: tl.constexpr):
    """Rounds a block of N elements to bfloat16: one pass, bits in registers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.int32, bitcast=True)
    # The upper half of the bits is the neighbour towards zero, the lower one the distance from it, in steps.
    distance = (bits & 0xFFFF).to(tl.float32) * 1.52587890625e-5  # 2**-16
    up = tl.where(uniform(key.to(tl.int64), at + first) < distance, 0x10000, 0)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = tl.where(is_nan, bits | 0x400000, bits + up) >> 16
    tl.store(out_ptr + at, rounded.to(tl.int16), mask=at < N)


def round_to_bfloat16(x_MK: Tensor, key: int, first: int) -> Tensor:
    """`lptune.kernels.round_to_bfloat16` of a tensor of any shape, in one pass."""
    x, n, block = x_MK.contiguous(), x_MK.numel(), 1024
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    tensors = (x, out.view(torch.int16))
    launch_key = ("bfloat16", x.get_device(), n)
    if n and not again.again(launch_key, tensors, (key, first)):
        grid = (triton.cdiv(n, block),)
        made = Launch(bfloat16_kernel, grid, 2, (n,), {"BLOCK": block}, 4, num_varying=2)
        again.first(launch_key, [made], tensors, (key, first))
    return out


class _TwoPhases(NamedTuple):
    """The launches of the two phases; fields as the constants of the second. tensors: those of the second;
    the first takes five of them.
    """

    dim: int
    multiply: bool
    twice: bool
    fmt: str
    power_of_two: bool
    tensors: tuple[Tensor, ...]

    def launches(self, config: TileConfig) -> list[Launch]:
        """The first phase and the second."""
        x, *_, q, second_q, _ = self.tensors
        (m, k), sizes = x.shape, (*x.shape, *x.stride())
        tiles_m, tiles_k = triton.cdiv(m, config.block_m), triton.cdiv(k, config.block_k)
        programs_m = triton.cdiv(tiles_m, TILES_PER_PROGRAM)
        block = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
        amax = {"ROWS": {0: 0, 1: 2, 2: 1}[self.dim], "COLUMNS": self.dim == 0, "TILES": TILES_PER_PROGRAM}
        amax |= {"MULTIPLY_ROWS": self.dim == 1 and self.multiply}
        amax |= {"MULTIPLY_COLUMNS": self.dim != 1 and self.multiply}
        store = {"DIM": self.dim, "MULTIPLY": self.multiply, "TWICE": self.twice}
        form = {"FORMAT": launch.rounding(self.fmt), "MAX": FORMATS[self.fmt].max}
        form |= {
            "POWER_OF_TWO": self.power_of_two,
            "HARDWARE_FLOAT8": launch.rounds_float8(x.device, self.twice),
        }
        grid, numbers = (tiles_k, tiles_m), (*sizes, *q.stride(), *second_q.stride())
        warps = config.num_warps
        return [
            Launch(amax_kernel, (tiles_k, programs_m), 5, sizes, amax | block, warps),
            Launch(stochastic_tiles_kernel, grid, 8, numbers, store | form | block, warps, num_varying=2),
        ]
