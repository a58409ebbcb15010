"""The quantizer by row, which reads x once: a program holds a row, rotates it if asked, finds its amax and
quantizes it, to nearest or stochastically. Why others read x twice, and what has run where: quantize.py.

An update of weights that are stored in INT8 may have to be dropped, which only the device knows: the kernel
then stores the values from before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import magnitude_bits, round_input, scale_from_amax
from lptune.kernels.triton.quantize import (
    NOT_SPECIALIZED,
    empty_q,
    in_two_phases,
    round_either,
    vector,
)
from lptune.kernels.triton.rotation import rotate, rotate_row
from lptune.numerics import FORMATS

LONGEST_HELD_ROW = 16384  # 32 elements in each of 512 threads


@triton.jit
def _load(
    x_ptr,
    multiplier_ptr,
    at,
    inside,
    ROUNDED_TO: tl.constexpr,
    MULTIPLY: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The BLOCK_K elements `at` of a row in float32: rounded, times the multiplier, rotated."""
    x = round_input(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), ROUNDED_TO)
    if MULTIPLY:
        x = x * tl.load(multiplier_ptr + at, mask=inside, other=0.0)
    return rotate_row(x, BLOCK_K) if ROTATED else x


@triton.jit
def _store(
    scaled,
    at,
    inside,
    row,
    q_ptr,
    q_before_ptr,
    found_inf_ptr,
    key,
    first,
    K,
    STOCHASTIC: tl.constexpr,
    MAY_SKIP: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
):
    """Rounds and stores the elements `at` of the row `row`, which begins at `q_ptr`."""
    q = round_either(scaled, row * K + at, key, first, STOCHASTIC, FORMAT, MAX, HARDWARE_FLOAT8)
    if MAY_SKIP:
        skips = tl.load(found_inf_ptr) == 1.0
        before = tl.load(q_before_ptr + row * K + at, mask=at < tl.where(skips, K, 0), other=0)
        q = tl.where(skips, before, q)
    tl.store(q_ptr + at, q, mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def rows_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    ends_ptr,
    q_before_ptr,
    scale_before_ptr,
    found_inf_ptr,
    key,
    first,
    K,
    stride_m,
    q_stride_m,
    scale_stride_m,
    E,
    ROUNDED_TO: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MULTIPLY: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    SCALE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    ROTATED: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MAY_SKIP: tl.constexpr,
):
    """Quantizes one row. x: (M, K), stride 1 along K. HELD: the row fits a block, and is read once. ROTATED:
    K and BLOCK_K are multiples of 128.

    ROUNDED_TO: as for `round_input`. SCALE_WIDTH: the floats of a row's scale; all but the first become 0.
    GROUPS: a power of two, at least E: the multiplier is that of the row's group, (E, K); 0: there is one.
    STOCHASTIC: rounds by the random bits of `key`, for the elements from `first` on, which are not read
    otherwise. MAY_SKIP: where `found_inf` is 1, the results are q_before (M, K) and scale_before.
    """
    row = tl.program_id(0).to(tl.int64)
    if GROUPS:
        groups = tl.arange(0, GROUPS)
        ends = tl.load(ends_ptr + groups, mask=groups < E, other=2**31 - 1)
        multiplier_ptr += tl.sum((ends <= row).to(tl.int64)) * K
    x_ptr += row * stride_m
    q_ptr += row * q_stride_m
    columns = tl.arange(0, BLOCK_K)
    if HELD:
        inside = columns < K
        x = _load(x_ptr, multiplier_ptr, columns, inside, ROUNDED_TO, MULTIPLY, ROTATED, BLOCK_K)
        amax_bits = tl.max(magnitude_bits(x), axis=0)
        scale, inverse = scale_from_amax(amax_bits, MAX, POWER_OF_TWO)
        _store(
            x * inverse, columns, inside, row, q_ptr, q_before_ptr, found_inf_ptr, key, first, K, STOCHASTIC,
            MAY_SKIP, FORMAT, MAX, HARDWARE_FLOAT8
        )  # fmt: skip
    else:
        largest = tl.zeros((BLOCK_K,), tl.int32)
        for start in range(0, K, BLOCK_K):
            at = start + columns
            x = _load(x_ptr, multiplier_ptr, at, at < K, ROUNDED_TO, MULTIPLY, ROTATED, BLOCK_K)
            bits = magnitude_bits(x)
            largest = tl.where(bits > largest, bits, largest)
        scale, inverse = scale_from_amax(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
        for start in range(0, K, BLOCK_K):
            at = start + columns
            x = _load(x_ptr, multiplier_ptr, at, at < K, ROUNDED_TO, MULTIPLY, ROTATED, BLOCK_K)
            _store(
                x * inverse, at, at < K, row, q_ptr, q_before_ptr, found_inf_ptr, key, first, K, STOCHASTIC,
                MAY_SKIP, FORMAT, MAX, HARDWARE_FLOAT8
            )  # fmt: skip
    if MAY_SKIP:
        scale = tl.where(tl.load(found_inf_ptr) == 1.0, tl.load(scale_before_ptr + row), scale)
    place = tl.arange(0, SCALE_WIDTH)
    tl.store(scale_ptr + row * scale_stride_m + place, tl.where(place == 0, scale, 0.0))


def quantize_rows(
    x_MK: Tensor,
    multiplier_1K: Tensor | None,
    fmt: str,
    power_of_two: bool,
    transposed: bool,
    rounded_to: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    rotated: bool = False,
    ends_E: Tensor | None = None,
    random: tuple[int, int] | tuple[()] = (),
    before: tuple[Tensor, Tensor] | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_rows`: reads x once; twice if `transposed` or if x is not stored row by row.

    rotated: a program rotates the row that it holds. Where that is not possible (another layout, or K is no
    multiple of 128), a rotated copy is made first, which costs 10 bytes of memory traffic an element.

    out: int8 q and scale to write to, of an x that is not empty and stored row by row. Their rows may be any
    distance apart. A scale may have several columns: the first is the scale, the others become 0.

    ends_E: where groups of rows end; the multiplier is then (E, K). Only of an x that is stored row by row.

    random: key and first index of stochastic rounding; (): to nearest. before: q and scale that are the
    results where `found_inf`, float32 with one element, is 1. Only of an x that is stored row by row.
    """
    m, k = x_MK.shape
    if rotated and (transposed or x_MK.stride(1) != 1 or k % 128):
        x_MK, rounded_to, rotated = rotate(x_MK, rounded_to, torch.float32), None, False
    if transposed or x_MK.stride(1) != 1 or m == 0 or k == 0:
        assert out is None
        assert ends_E is None or m == 0 or k == 0
        x_MK = x_MK if rounded_to is None else x_MK.to(rounded_to)
        of_rows = (2, False, multiplier_1K, None, transposed)
        q, scale, _, _ = in_two_phases(x_MK, fmt, power_of_two, *of_rows, random=random)
        return q, scale
    q, scale = out or (empty_q(x_MK, False), x_MK.new_empty(m, 1, dtype=torch.float32))
    may_skip = before is not None and found_inf is not None
    kept: tuple[Tensor | None, ...] = (None, None, None)
    if before is not None and found_inf is not None:
        kept = (*(each.contiguous() for each in before), found_inf)
    tensors = (x_MK, vector(multiplier_1K, x_MK), q, scale, ends_E, *kept)
    num_groups = 0 if ends_E is None else len(ends_E)
    numbers = (k, x_MK.stride(0), q.stride(0), scale.stride(0), num_groups)
    dtypes = (x_MK.dtype, x_MK.dtype if multiplier_1K is None else multiplier_1K.dtype)
    options = (fmt, power_of_two, multiplier_1K is None, rounded_to, rotated, bool(random), may_skip)
    key = ("rows", x_MK.get_device(), m, *numbers, *dtypes, *options, scale.shape[1])
    if not again.again(key, tensors, random):
        held = k <= LONGEST_HELD_ROW
        block_k = triton.next_power_of_2(k) if held else 4096
        constants = launch.format_constants(fmt, x_MK.device, power_of_two) | {
            "ROUNDED_TO": launch.rounding_of_input(x_MK, rounded_to),
            "MULTIPLY": multiplier_1K is not None,
            "SCALE_WIDTH": scale.shape[1],
            "BLOCK_K": block_k,
            "HELD": held,
            "ROTATED": rotated,
            "GROUPS": triton.next_power_of_2(num_groups) if num_groups else 0,
            "STOCHASTIC": bool(random),
            "MAY_SKIP": may_skip,
        }
        no_random = () if random else (0, 0)  # in the places of key and first
        how = ((*no_random, *numbers), constants, rows_num_warps(block_k))
        rows = Launch(rows_kernel, (m,), len(tensors), *how, num_varying=len(random))
        again.first(key, [rows], tensors, random)
    return q.view(FORMATS[fmt].dtype), scale


def rows_num_warps(block_k: int) -> int:
    """Warps of `rows_kernel`: 16 elements a thread, 32 for the longest rows; 64 spilled."""
    return min(max(block_k // 512, 1), 16)
