"""Ternary weights, those of BitNet b1.58 (arXiv:2402.17764): -1, 0 or 1, times one scale for the matrix.

    r  = 1 / mean(|w|), rounded to bfloat16
    q  = round(w * r), clipped to -1 to 1
    w' = q * scale, scale = 1 / r

Servers hold r in the 16 bits of the model, and divide by it. A number of bfloat16 is exact there. If w is
bfloat16, so is the product w * r in float32, and no device can round a tie to another code.

A mean of all elements would depend on the order of its sum, and so on how many ranks share the rows. So rows
are summed one by one in float64, and rounded to float32; these sums, of all rows in their order, give the
mean.

A code takes 2 bits, as q + 1. Byte i along a dimension of size D has the codes i, i + D / 4, i + D / 2 and
i + 3 D / 4, the first in its lowest bits: the layout of transformers along the rows, of our gather along K.
"""

import torch
from torch import Tensor

from lptune.numerics.quantize import QuantizedTensor, nan_as_inf

TERNARY_PACKED = 4
"""Codes in a byte."""


def sums_of_rows(w_MK: Tensor) -> Tensor:
    """The sum of |w| of each row, (M, 1) float32. w_MK: any float dtype."""
    sums: Tensor = torch.linalg.vector_norm(w_MK, 1, 1, keepdim=True, dtype=torch.float64)
    return sums.to(torch.float32)


def ternary_scale(sums_N1: Tensor, k: int) -> Tensor:
    """The scale (1, 1), float32, of a matrix with these `sums_of_rows`, each of `k` elements: 0 if all are
    zero, NaN if one is not finite.
    """
    mean = nan_as_inf(sums_N1).to(torch.float64).sum() / (sums_N1.numel() * k)
    r = (1 / mean).to(torch.bfloat16).to(torch.float32)
    return torch.where(mean.isinf(), torch.nan, 1 / r).view(1, 1)


def server_scale(scale_11: Tensor) -> Tensor:
    """r of a scale, (1, 1) float32 with a value of bfloat16; 1 for a matrix of zeros."""
    return torch.where(scale_11 == 0, 1.0, 1 / scale_11).to(torch.bfloat16).to(torch.float32)


def quantize_ternary(w_MK: Tensor, scale_11: Tensor | None = None) -> QuantizedTensor:
    """w_MK, of any float dtype, as codes of -1 to 1 in int8. scale_11: `ternary_scale` of the matrix of which
    w_MK is some rows; None: it is all of it.
    """
    if scale_11 is None:
        scale_11 = ternary_scale(sums_of_rows(w_MK), w_MK.shape[1])
    q_MK = (w_MK.to(torch.float32) * server_scale(scale_11)).round_().clamp_(-1, 1)
    return QuantizedTensor(torch.where(scale_11 > 0, q_MK, 0.0).to(torch.int8), scale_11)


def pack_ternary(q: Tensor, dim: int) -> Tensor:
    """Codes as uint8, 4 in a byte along `dim`, whose size is a multiple of 4."""
    first, *others = (q + 1).to(torch.uint8).chunk(TERNARY_PACKED, dim)
    for i, codes in enumerate(others, 1):
        first = first | codes << 2 * i
    return first


def unpack_ternary(packed: Tensor, dim: int) -> Tensor:
    """The inverse of `pack_ternary`: int8."""
    codes = [packed >> 2 * i & 3 for i in range(TERNARY_PACKED)]
    return torch.cat(codes, dim).to(torch.int8) - 1
