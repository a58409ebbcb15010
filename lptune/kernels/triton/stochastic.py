"""Quantizers that round stochastically, with the random bits of `numerics.uniform`.

    rows             x is read once, by programs that hold whole rows
    columns, tensor  x is read twice, by the two phases of quantize.py

Weights that are stored in INT8 are rounded here too, by rows, after each update (training/chunked_adamw.py).
An update may have to be dropped, which only the device knows: the kernel then stores the values from before.

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.by_row import LONGEST_HELD_ROW, rows_num_warps
from lptune.kernels.triton.formats import magnitude_bits, scale_from_amax, stochastic_round_to, uniform
from lptune.kernels.triton.quantize import NOT_SPECIALIZED, empty_q, in_two_phases
from lptune.numerics import FORMATS


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


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
        constants = launch.format_constants(fmt, device, power_of_two) | {
            "MULTIPLY": multiplier_1K is not None,
            "MAY_SKIP": may_skip,
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

    transposed: q is stored column by column. twice: of a tensor, q is stored row by row, and q again column
    by column; else the last result is empty.
    """
    if dim == 1 and not transposed and not twice and x_MK.stride(1) == 1:
        q, scale = quantize_rows_stochastic(x_MK, multiplier, fmt, power_of_two, key, first)
        return q, scale, q[:0]
    rows, is_columns = {0: (0, True), 1: (2, False), 2: (1, False)}[dim]
    of_rows, of_columns = (multiplier, None) if dim == 1 else (None, multiplier)
    how, random = (transposed or twice, twice), (key, first)
    q, scale, column_q, column_scale = in_two_phases(
        x_MK, fmt, power_of_two, rows, is_columns, of_rows, of_columns, *how, random
    )
    return (column_q, column_scale, q) if is_columns else (q, scale, column_q)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
