"""MX: blocks of 32 along the contraction, each with a scale that is a power of two (OCP MX v1.0).

The scale is stored in E8M0, eight bits of exponent, so a block of 32 takes 33 bytes. Applying such a scale to
an accumulator means adding exponents; the tensor cores of Blackwell do so inside the GEMM.

The exponent is rounded up: `2**ceil(log2(amax / max))`, called RCEIL in NVIDIA's training recipe
(arXiv:2506.08027). The example in the specification takes the exponent of amax alone, and so saturates values
just below the next power of two.
"""

import torch
from torch import Tensor

from lptune.numerics.formats import E4M3, Format
from lptune.numerics.quantize import QuantizedBlocks, quantize_blocks

MX_BLOCK = 32


def to_e8m0(scale: Tensor) -> Tensor:
    """A float32 scale that is a power of two, 0 or NaN -> float8_e8m0fnu, same shape.

    E8M0 has no zero: a zero becomes the smallest number, 2**-127, which is harmless, since every element of
    that block is 0. NaN is 0xff. The cast of torch would round; here the exponent bits are moved.
    """
    bits = (scale.view(torch.int32) >> 23) & 0xFF
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_mx(x_MK: Tensor, dim: int, fmt: Format = E4M3) -> QuantizedBlocks:
    """`quantize_blocks` of 32 elements along `dim`, with scales in E8M0."""
    block = (1, MX_BLOCK) if dim == 1 else (MX_BLOCK, 1)
    q, scale = quantize_blocks(x_MK, block, fmt, power_of_two=True)
    return QuantizedBlocks(q, to_e8m0(scale))
