"""Quantization with one scale per row or per column.

A scale always dequantizes, `x ≈ q * scale`, is float32, and is `amax / max` of what it covers: a row of the
matrix as stored (`quantize_rows`, what a GEMM contracting over the row needs) or a column
(`quantize_columns`). One scale per row and not per tensor: an outlier token or channel then coarsens itself
only.

Three choices that cost others accuracy:
- scales are float32 whatever the input: an amax of 1e-6 in float16 underflows a scale kept in float16 to
zero;
- no scale is clamped from below. A floor such as 1e-12 ruins small gradients: after folding a weight scale
into
  g, |g * s| near 1e-10 is ordinary. A zero row has scale 0, and a 1 in its place would be folded into g and
  drown the others (one zero row in 4,096 took grad_input's error from 0.01 to 0.94); only the divisor is
  replaced;
- an inf or NaN makes its scale NaN, so that it comes out of the GEMM as NaN and never as a plausible number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lptune.numerics.formats import INT8, Format


class QuantizedRows(NamedTuple):
    """A matrix with one scale per row."""

    q_MK: Tensor  # fmt.dtype
    scale_M1: Tensor  # float32, q_MK * scale_M1 ≈ x_MK


class QuantizedColumns(NamedTuple):
    """A matrix with one scale per column."""

    q_MK: Tensor  # fmt.dtype
    scale_1K: Tensor  # float32, q_MK * scale_1K ≈ x_MK


def quantize_rows(x_MK: Tensor, fmt: Format = INT8) -> QuantizedRows:
    """One scale per row. x_MK: any float dtype, (M, K), K > 0. |q * scale - x| <= scale / 2 for finite
    rows.
    """
    return QuantizedRows(*_quantize(x_MK, 1, fmt))


def quantize_columns(x_MK: Tensor, fmt: Format = INT8) -> QuantizedColumns:
    """One scale per column. x_MK: any float dtype, (M, K), M > 0. |q * scale - x| <= scale / 2 for finite
    columns.
    """
    return QuantizedColumns(*_quantize(x_MK, 0, fmt))


def dequantize(quantized: QuantizedRows | QuantizedColumns, dtype: torch.dtype = torch.float32) -> Tensor:
    """`(q * scale)` in float32, rounded once to `dtype`."""
    q, scale = quantized
    return (q.to(torch.float32) * scale).to(dtype)


def _quantize(x: Tensor, dim: int, fmt: Format) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2, x.shape
    x32 = x.to(torch.float32)
    if x32.shape[dim] == 0:  # nothing to scale, and amax has no identity
        kept = (x32.shape[0], 1) if dim == 1 else (1, x32.shape[1])
        return x32.to(fmt.dtype), x32.new_zeros(kept)
    # The two extrema instead of abs().amax(): one reading less in eager mode; both propagate NaN.
    amax = torch.maximum(x32.amax(dim=dim, keepdim=True), -x32.amin(dim=dim, keepdim=True))
    scale = amax / fmt.max
    scale = torch.where(scale == torch.inf, torch.nan, scale)
    # amax / 127 is 0 for a zero row and also where float32 underflows: all of it quantizes to 0.
    divisor = torch.where(scale == 0, torch.inf, scale)
    # The clamp only acts where the scale is subnormal and therefore coarse; elsewhere |x / scale| <=
    # 127.00002.
    # What a NaN becomes here does not matter: its scale is NaN.
    return (x32 / divisor).round_().clamp_(-fmt.max, fmt.max).to(fmt.dtype), scale
