"""NVFP4: floating-point numbers of 4 bits, with scales on two levels (NVIDIA, arXiv:2509.25149).

    t  = amax of the tensor / (448 * 6)       float32
    s  = amax of a block / (6 t)              rounded to e4m3; a block is 16 values of a row, or 16 x 16
    q  = x / (s t)                            rounded to e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign
    x' = q * s * t

A block of 16 takes 9 bytes, 4.5 bits a value. With 8 magnitudes a scale must fit closely: MX's powers of two
would waste up to half of them, and e4m3 follows the amax of a block to 1/16. e4m3 itself has little range, so
t moves the largest block of the tensor to its end. A block more than 2^18.8 times smaller than that becomes
zeros.

s is rounded to nearest, as published. Where it was rounded down, values beyond 6 s t saturate: those within
1/16 of the amax of a block, more where s is below 2^-6, the smallest normal number of e4m3. Stochastic
rounding has the right mean for all others.

**Rotation.** 8 magnitudes are few where one outlier sets the scale. A GEMM gives the same result if both
operands are rotated along the contraction by an orthogonal matrix (rotation.py). Here it is D H: 16 fixed
random signs D, then a Hadamard block of 16, along the blocks that share a scale. Without signs, the equal
values of a block would become one outlier. The signs are those of NVIDIA's Transformer Engine.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.numerics.formats import E2M1, E4M3, Format
from lptune.numerics.quantize import find_scale
from lptune.numerics.rotation import rotate_blocks

NVFP4_BLOCK = 16
"""Elements along the contraction that share a scale."""
_BOTH_LEVELS = Format("e2m1 of e4m3", torch.float32, E2M1.max * E4M3.max)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class QuantizedNvfp4(NamedTuple):
    """A matrix in blocks along its rows, which are padded with zeros to whole blocks: K' columns."""

    q_MK: Tensor
    """float8_e4m3fn, (M, K'), with numbers of e2m1 only."""
    scale: Tensor
    """float8_e4m3fn, (M, K' / 16), also for blocks of 16 x 16: each row has its scales."""
    tensor_scale_11: Tensor
    """float32."""


def quantize_nvfp4(x_MK: Tensor, *, square: bool = False, random_MK: Tensor | None = None) -> QuantizedNvfp4:
    """x_MK in NVFP4, rounded to nearest, ties to even. A NaN or inf makes the scale of the tensor NaN.

    x_MK: any float dtype, any size. square: a scale covers 16 x 16 elements, so that the transposed matrix
    has the same values. random_MK: uniform in [0, 1), (M, K'), to round stochastically.
    """
    m, k = x_MK.shape
    rows = NVFP4_BLOCK if square else 1
    x32 = F.pad(x_MK.to(torch.float32), (0, -k % NVFP4_BLOCK, 0, -m % rows))
    tensor_scale_11, inverse_11 = find_scale(x32, (0, 1), _BOTH_LEVELS)
    sizes = (x32.shape[0] // rows, rows, x32.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    scaled = (x32 * inverse_11).reshape(sizes)
    scale = (scaled.abs().amax((1, 3), keepdim=True) / E2M1.max).clamp(max=E4M3.max).to(E4M3.dtype)
    scale32 = scale.to(torch.float32)
    scaled = (scaled / torch.where(scale32 > 0, scale32, torch.inf)).flatten(0, 1).flatten(1)[:m]
    by_rows = scale.view(torch.uint8).expand(-1, rows, -1, -1).flatten(0, 1).flatten(1)[:m]
    by_rows = by_rows.contiguous().view(E4M3.dtype)
    return QuantizedNvfp4(round_to_e2m1(scaled, random_MK), by_rows, tensor_scale_11)


def dequantize_nvfp4(quantized: QuantizedNvfp4, dtype: torch.dtype) -> Tensor:
    """q * s * t in float32, rounded once to `dtype`; (M, K')."""
    q_MK, scale, tensor_scale_11 = quantized
    return (scaled_by_block(q_MK, scale) * tensor_scale_11).to(dtype)


def scaled_by_block(q_MK: Tensor, scale: Tensor) -> Tensor:
    """q * s, which is exact: float32, (M, K')."""
    return q_MK.to(torch.float32) * scale.to(torch.float32).repeat_interleave(NVFP4_BLOCK, 1)


def round_to_e2m1(scaled: Tensor, random: Tensor | None = None) -> Tensor:
    """float32 -> the nearest numbers of e2m1, ties to even, in float8_e4m3fn; or one of the two neighbours by
    `random`, uniform in [0, 1), as in `stochastic_round_to`. Beyond 6 they saturate.
    """
    scaled = scaled.clamp(-E2M1.max, E2M1.max)
    magnitude = scaled.abs()
    step = 0.5 * (1 + (magnitude >= 2).float() + 2 * (magnitude >= 4))  # 0.5, 1 or 2
    steps = scaled / step
    if random is None:
        return (steps.round() * step).to(E2M1.dtype)
    below = steps.floor()
    return ((below + (random < steps - below)) * step).to(E2M1.dtype)


def rotate_nvfp4(x_MK: Tensor) -> Tensor:
    """`x @ D H` block by block in float32, (M, K'). Orthogonal; not its own inverse."""
    x32 = F.pad(x_MK.to(torch.float32), (0, -x_MK.shape[1] % NVFP4_BLOCK))
    signs = torch.tensor(_SIGNS, dtype=torch.float32, device=x_MK.device)
    blocks = x32.unflatten(1, (x32.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK))
    return rotate_blocks(blocks * signs).flatten(1)
