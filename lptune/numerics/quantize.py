"""Quantization with one scale per row, per column, per tensor or per block.

A scale always dequantizes, `x ≈ q * scale`; it is float32 and equals `amax / max` over the elements that
share it. How many elements share a scale is a trade. An outlier makes the step coarser for all elements that
share its scale, so fewer is better. But a scale can be moved out of the sum of a GEMM only if it is constant
along the contraction.

    quantize_rows      (M, 1)      for the left operand of a GEMM that contracts over the row
    quantize_columns   (1, K)      for the right operand of a GEMM that contracts over the column
    quantize_tensor    (1, 1)      one scale for every GEMM with this tensor
    quantize_blocks    (M/bm, K/bk)  the GEMM applies the scales block by block inside the sum

Every implementation computes the following (this one, the C++ and the Triton one give the same bits):

    scale   = amax / max    rounded once to float32        or the next power of two
    inverse = max / amax    rounded once to float32        or 1 / scale, exactly
    q       = round to nearest even (x * inverse)          one float32 product per element

It is a product, not a quotient, because compilers replace a quotient by an approximation.

Three choices that other implementations make differently, at the cost of accuracy:

- scales are float32 for every input dtype: with an amax of 1e-6, a float16 scale would underflow to zero;
- scales are not clamped to something like 1e-12. That would ruin small gradients: after a weight scale is
  folded into g, |g * s| near 1e-10 is ordinary. A scale is at least the smallest normal float32, 2**-126, so
  that its inverse is finite. A row of zeros has scale 0. A scale of 1 in its place would be folded into g and
  dominate the other rows (one zero row in 4,096 took the error of grad_input from 0.01 to 0.94);
- an inf or NaN makes its scale NaN, so that the result of the GEMM is NaN and never a plausible number. The
  value of q is then unspecified.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.numerics.formats import INT8, Format

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; its inverse, 2**126, is finite


class QuantizedRows(NamedTuple):
    """A matrix with one scale per row."""

    q_MK: Tensor  # fmt.dtype
    scale_M1: Tensor  # float32, q_MK * scale_M1 ≈ x_MK


class QuantizedColumns(NamedTuple):
    """A matrix with one scale per column."""

    q_MK: Tensor  # fmt.dtype
    scale_1K: Tensor  # float32, q_MK * scale_1K ≈ x_MK


class QuantizedTensor(NamedTuple):
    """A matrix with one scale for all of it."""

    q_MK: Tensor  # fmt.dtype
    scale_11: Tensor  # float32, q_MK * scale_11 ≈ x_MK


class QuantizedBlocks(NamedTuple):
    """A matrix with one scale per block of bm x bk; the last block of a row or column may be smaller."""

    q_MK: Tensor  # fmt.dtype
    scale: Tensor  # float32, or float8_e8m0fnu (mx.py); (ceil(M / bm), ceil(K / bk))


class Scale(NamedTuple):
    """A scale, and its inverse, with which an element is multiplied to be quantized."""

    scale: Tensor  # float32
    inverse: Tensor  # float32; 1 / scale up to one rounding, 0 where scale is 0 or NaN


def scale_from_amax(amax: Tensor, fmt: Format, power_of_two: bool = False) -> Scale:
    """The scale that maps `amax` (float32, >= 0, any shape) to the largest number of `fmt`.

    power_of_two: the smallest power of two that is at least amax / max, so that nothing saturates. Dividing
    by it is exact. So a float8 number times such a scale can be quantized again by another such scale without
    rounding, unless it falls below the smallest normal number of the format.

    For an amax of 0, scale and inverse are 0. For inf or NaN, the scale is NaN and the inverse 0.
    """
    # Computed in float64 and rounded once to float32, since compilers may approximate a float32 division.
    scale = (amax.to(torch.float64) / fmt.max).to(torch.float32)
    if power_of_two:
        # The next power of two, on the bits: round the exponent up if any bit of the significand is set.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = scale.clamp(min=SMALLEST_SCALE)
        inverse = scale.reciprocal()  # exact
    else:
        inverse = (fmt.max / amax.to(torch.float64)).to(torch.float32)
        tiny = scale < SMALLEST_SCALE
        scale = torch.where(tiny, SMALLEST_SCALE, scale)
        inverse = torch.where(tiny, 1 / SMALLEST_SCALE, inverse)
    scale = torch.where(amax == 0, 0.0, scale)
    not_finite = ~(amax < torch.inf)  # NaN compares false
    scale = torch.where(not_finite, torch.nan, scale)
    return Scale(scale, torch.where((amax == 0) | not_finite, 0.0, inverse))


def nan_as_inf(amax: Tensor) -> Tensor:
    """`amax` with inf for each NaN: before a maximum over ranks.

    NaN has no order that every backend agrees on. inf has one, and gives the same scale: NaN.
    """
    return torch.where(amax.isnan(), torch.inf, amax)


def round_to(scaled: Tensor, fmt: Format) -> Tensor:
    """float32 values already multiplied by an inverse scale -> the nearest numbers of `fmt`, ties to even.

    Values beyond the range of the format saturate, also inf. With a scale from their own amax, values exceed
    the range only by the rounding of the inverse. NaN is unspecified for INT8 and stays NaN in float8.
    """
    scaled = scaled.clamp(-fmt.max, fmt.max)
    return (scaled.round() if fmt.mantissa_bits is None else scaled).to(fmt.dtype)


def quantize_rows(x_MK: Tensor, fmt: Format = INT8, *, power_of_two: bool = False) -> QuantizedRows:
    """One scale per row. x_MK: any float dtype, (M, K).

    For INT8, |q * scale - x| <= scale / 2 in finite rows, up to float32 rounding.
    """
    return QuantizedRows(*_quantize(x_MK, 1, fmt, power_of_two))


def quantize_columns(x_MK: Tensor, fmt: Format = INT8, *, power_of_two: bool = False) -> QuantizedColumns:
    """One scale per column. x_MK: any float dtype, (M, K)."""
    return QuantizedColumns(*_quantize(x_MK, 0, fmt, power_of_two))


def quantize_tensor(x_MK: Tensor, fmt: Format = INT8, *, power_of_two: bool = False) -> QuantizedTensor:
    """One scale for the whole tensor. x_MK: any float dtype, (M, K)."""
    return QuantizedTensor(*_quantize(x_MK, (0, 1), fmt, power_of_two))


def quantize_blocks(
    x_MK: Tensor, block: tuple[int, int], fmt: Format, *, power_of_two: bool = False
) -> QuantizedBlocks:
    """One scale per block of `block` (rows, columns). x_MK: any float dtype, (M, K), of any size.

    If M or K is not a multiple of the block size, the last blocks are smaller.
    """
    m, k = x_MK.shape
    rows, columns = block
    # The last blocks are padded with zeros, which do not change an amax.
    x32 = F.pad(x_MK.to(torch.float32), (0, -k % columns, 0, -m % rows))
    split = x32.view(x32.shape[0] // rows, rows, x32.shape[1] // columns, columns)
    scale, inverse = scale_from_amax(_amax(split, (1, 3)), fmt, power_of_two)
    q = round_to(split * inverse, fmt).view(x32.shape)[:m, :k]
    return QuantizedBlocks(q.contiguous(), scale[:, 0, :, 0])


def dequantize(
    quantized: QuantizedRows | QuantizedColumns | QuantizedTensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`(q * scale)` in float32, rounded once to `dtype`."""
    q, scale = quantized
    return (q.to(torch.float32) * scale).to(dtype)


def dequantize_blocks(
    quantized: QuantizedBlocks, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """`(q * scale)` in float32, rounded once to `dtype`. block: that of `quantize_blocks`."""
    m, k = quantized.q_MK.shape
    scale = expand_blocks(quantized.scale, block, (m, k))
    return (quantized.q_MK.to(torch.float32) * scale).to(dtype)


def expand_blocks(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Expands block scales (any dtype) to one float32 scale for each element of a matrix of `shape`."""
    expanded = scale.to(torch.float32).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return expanded[: shape[0], : shape[1]]


def find_scale(x_MK: Tensor, dim: int | tuple[int, int], fmt: Format, power_of_two: bool = False) -> Scale:
    """The scales by `dim`: 1 for rows, (M, 1); 0 for columns, (1, K); (0, 1) for the tensor, (1, 1)."""
    assert x_MK.dim() == 2, x_MK.shape
    return scale_from_amax(_amax(x_MK.to(torch.float32), dim), fmt, power_of_two)


def _amax(x32: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    if x32.numel() == 0:  # amax of an empty tensor is an error
        return x32.sum(dim=dim, keepdim=True)
    # Minimum and maximum, not abs().amax(): eager mode then reads x once less. Both propagate NaN.
    return torch.maximum(x32.amax(dim=dim, keepdim=True), -x32.amin(dim=dim, keepdim=True))


def _quantize(
    x: Tensor, dim: int | tuple[int, int], fmt: Format, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    scale, inverse = find_scale(x, dim, fmt, power_of_two)
    return round_to(x.to(torch.float32) * inverse, fmt), scale
