"""Four bits a weight: integers with a scale for each 32 columns of a row.

    scale = amax(32 columns of a row) / 7, rounded to bfloat16
    q     = round(w / scale)        -7 to 7: without -8 a value and its negative are rounded alike
    w'    = q * scale

INT4 servers (Marlin in vLLM and SGLang) hold the scales in the 16 bits of the model. A scale that is a number
of bfloat16 is exact in float32, and in float16 where that has it, so servers multiply by w' itself. A group
of 32 costs half a bit a weight for its scale; one of 128 an eighth of a bit, with 1.6 dB more noise.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.numerics.formats import INT4

INT4_GROUP = 32
"""Columns of a row that share a scale."""


class QuantizedGroups(NamedTuple):
    """A matrix in 4 bits."""

    q_NK: Tensor
    """int8, -7 to 7."""
    scale_NG: Tensor
    """float32 with values of bfloat16. The last group of a row may be shorter."""


def quantize_groups(w_NK: Tensor) -> QuantizedGroups:
    """w_NK in 4 bits, rounded to nearest, ties to even. A group with a value that is not finite has a scale
    of NaN, so that no such value is lost; one of zeros has a scale of 1.

    w_NK: any float dtype.
    """
    k = w_NK.shape[1]
    num_groups = math.ceil(k / INT4_GROUP)
    padded = F.pad(w_NK, (0, num_groups * INT4_GROUP - k)) if k % INT4_GROUP else w_NK
    w_NGC = padded.unflatten(1, (num_groups, INT4_GROUP)).to(torch.float32)
    scale_NG = (w_NGC.abs().amax(2) / INT4.max).to(torch.bfloat16).to(torch.float32)
    # An amax of zero, or so small that its scale is.
    scale_NG = torch.where(scale_NG == 0, 1.0, torch.where(scale_NG.isinf(), torch.nan, scale_NG))
    q_NGC = (w_NGC / scale_NG.unsqueeze(2)).round_().clamp_(-INT4.max, INT4.max).nan_to_num_(0.0)
    return QuantizedGroups(q_NGC.to(torch.int8).flatten(1)[:, :k], scale_NG)


def dequantize_groups(quantized: QuantizedGroups, dtype: torch.dtype) -> Tensor:
    """q * scale, multiplied in float32 and rounded once to `dtype`, (N, K)."""
    q_NK, scale_NG = quantized
    scale_NK = scale_NG.repeat_interleave(INT4_GROUP, 1)[:, : q_NK.shape[1]]
    return (q_NK * scale_NK).to(dtype)
