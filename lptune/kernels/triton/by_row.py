"""The quantizer by row, which reads x once: a program holds a row, rotates it if asked, finds its amax and
quantizes it. Why others read x twice, and what has run where: quantize.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import magnitude_bits, round_input, round_to, scale_from_amax
from lptune.kernels.triton.quantize import empty_q, in_two_phases, vector
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
def rows_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    ends_ptr,
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
):
    """Quantizes one row. x: (M, K), stride 1 along K. HELD: the row fits a block, and is read once. ROTATED:
    K and BLOCK_K are multiples of 128.

    ROUNDED_TO: as for `round_input`. SCALE_WIDTH: the floats of a row's scale; all but the first become 0.
    GROUPS: a power of two, at least E: the multiplier is that of the row's group, (E, K); 0: there is one.
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
        tl.store(q_ptr + columns, round_to(x * inverse, FORMAT, MAX, HARDWARE_FLOAT8), mask=inside)
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
            q = round_to(x * inverse, FORMAT, MAX, HARDWARE_FLOAT8)
            tl.store(q_ptr + at, q, mask=at < K)
    first = tl.arange(0, SCALE_WIDTH)
    tl.store(scale_ptr + row * scale_stride_m + first, tl.where(first == 0, scale, 0.0))


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
) -> tuple[Tensor, Tensor]:
    """`lptune::quantize_rows`: reads x once; twice if `transposed` or if x is not stored row by row.

    rotated: a program rotates the row that it holds. Where that is not possible (another layout, or K is no
    multiple of 128), a rotated copy is made first, which costs 10 bytes of memory traffic an element.

    out: int8 q and scale to write to, of an x that is not empty and stored row by row. Their rows may be any
    distance apart. A scale may have several columns: the first is the scale, the others become 0.

    ends_E: where groups of rows end; the multiplier is then (E, K). Only of an x that is stored row by row.
    """
    m, k = x_MK.shape
    if rotated and (transposed or x_MK.stride(1) != 1 or k % 128):
        x_MK, rounded_to, rotated = rotate(x_MK, rounded_to, torch.float32), None, False
    if transposed or x_MK.stride(1) != 1 or m == 0 or k == 0:
        assert out is None
        assert ends_E is None or m == 0 or k == 0
        x_MK = x_MK if rounded_to is None else x_MK.to(rounded_to)
        q, scale, _, _ = in_two_phases(x_MK, fmt, power_of_two, 2, False, multiplier_1K, None, transposed)
        return q, scale
    q, scale = out or (empty_q(x_MK, False), x_MK.new_empty(m, 1, dtype=torch.float32))
    tensors = (x_MK, vector(multiplier_1K, x_MK), q, scale, ends_E)
    num_groups = 0 if ends_E is None else len(ends_E)
    numbers = (k, x_MK.stride(0), q.stride(0), scale.stride(0), num_groups)
    options = (x_MK.dtype, tensors[1].dtype, fmt, power_of_two, multiplier_1K is None, rounded_to, rotated)
    key = ("rows", x_MK.get_device(), m, *numbers, *options, scale.shape[1])
    if not again.again(key, tensors):
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
        }
        rows = Launch(rows_kernel, (m,), len(tensors), numbers, constants, rows_num_warps(block_k))
        again.first(key, [rows], tensors)
    return q.view(FORMATS[fmt].dtype), scale


def rows_num_warps(block_k: int) -> int:
    """Warps of `rows_kernel`: 16 elements a thread, 32 for the longest rows; 64 spilled."""
    return min(max(block_k // 512, 1), 16)
