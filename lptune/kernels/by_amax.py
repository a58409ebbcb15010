"""Quantizing some rows of a matrix whose other rows are on other ranks, and measuring them before.

The rows of a rank are quantized by the amaxes of the whole matrix, on which ranks agree (linear/weights). So
the caller gives the amaxes, and one pass over the rows is enough. It also rounds a float32 master to the
compute dtype. `block_amaxes` measures rows whose first one may lie inside a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune import numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.layout import empty_q
from lptune.kernels.op import op
from lptune.numerics import FORMATS


def _empty_by_amax(x_MK: Tensor, amax: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    return empty_q(x_MK, fmt), torch.empty_like(amax)


@op(fake=_empty_by_amax)
def quantize_by_amax(
    x_MK: Tensor,
    amax: Tensor,
    fmt: str,
    *,
    power_of_two: bool = False,
    block: int | None = None,
    first_row: int = 0,
    rounded_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(q_MK, scale) of some rows of a larger matrix, bitwise those of the whole matrix with this `amax`.

    amax: float32 of the larger matrix, (1, 1), or one for each of its blocks of `block` x `block`; scale has
    its shape. first_row: row of the larger matrix at which x begins. rounded_to: as for `quantize_rows`; the
    amax is that of rounded values. Values above the amax saturate, but inf and NaN become NaN in float8.
    """
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        quantize = triton_kernels().quantize_by_amax
        q, scale = quantize(x_MK, amax, fmt, power_of_two, block, first_row, rounded_to)
        return q, scale
    if backend == "native" and native.has_format(fmt):
        return native.quantize_by_amax(x_MK, amax, fmt, power_of_two, block, first_row, rounded_to)
    x_MK = x_MK if rounded_to is None else x_MK.to(rounded_to)
    (m, k), form = x_MK.shape, FORMATS[fmt]
    scale, inverse = numerics.scale_from_amax(amax, form, power_of_two)
    if block is not None:
        first_block = first_row // block
        above = first_row - first_block * block
        inverse = numerics.expand_blocks(inverse[first_block:], (block, block), (above + m, k))[above:]
    x32 = x_MK.to(torch.float32)
    scaled = x32 * inverse
    if form.mantissa_bits is not None:
        # An amax of past steps does not show an inf, which would saturate.
        scaled = torch.where(x32.isinf(), torch.nan, scaled)
    return numerics.round_to(scaled, form).contiguous(), scale


def _empty_block_amaxes(x_MK: Tensor, block: int, above: int) -> Tensor:
    m, k = x_MK.shape
    return x_MK.new_empty((-(-(above + m) // block), -(-k // block)), dtype=torch.float32)


@op(fake=_empty_block_amaxes)
def block_amaxes(x_MK: Tensor, block: int, above: int) -> Tensor:
    """The amaxes of blocks of `block` x `block`, float32 (ceil((above + M) / block), ceil(K / block)).

    above: number of rows of the first blocks that lie above x. Their elements do not count.
    """
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton" and x_MK.numel():
        amaxes: Tensor = triton_kernels().block_amaxes(x_MK, block, above)
        return amaxes
    if backend == "native":
        return native.block_amaxes(x_MK, block, above)
    m, k = x_MK.shape
    # The first and the last block are padded with zeros, which do not change an amax.
    filled = F.pad(x_MK.abs(), (0, -k % block, above, -(above + m) % block))
    tiles = filled.view(-(-(above + m) // block), block, -(-k // block), block)
    return tiles.amax((1, 3)).to(torch.float32)
