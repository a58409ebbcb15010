"""Reads boxes of a folder's weights, as float values, whatever they are stored as.

Of a quantized weight (models/quantized.py) only the codes of the box are read, and the scales of these codes.
So a rank dequantizes what it holds and no more. The product of code and scale is computed in float32 and not
rounded to the dtype that config.json names: float32 master weights keep what the folder has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.models import HFIndex
from lptune.models.headers import StoredTensor
from lptune.models.quantized import MX_GROUP, PACKED, Quantized

# e2m1: a sign, two bits of exponent, one of mantissa.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_NO_EXPONENT = 255  # NaN in E8M0


def read_box(
    open_file: Callable[[str], Any], index: HFIndex, name: str, box: tuple[slice, ...] = ()
) -> Tensor:
    """A box of the tensor `name`, in its dtype, or float32 if it is quantized. (): the whole tensor.

    open_file: gives the opened safetensors file of that name. Raises UserError for a scale that is not
    finite.
    """
    stored = index.tensors[name]
    if stored.quantized is None:
        tensors = open_file(stored.file)
        # safetensors does not accept an empty index, for a tensor without dimensions.
        part: Tensor = tensors.get_slice(name)[box] if box else tensors.get_tensor(name)
        return part
    bounds = [each.indices(size)[:2] for each, size in zip(box, stored.shape, strict=False)]
    bounds += [(0, size) for size in stored.shape[len(bounds) :]]
    values, scale = _read(open_file, stored, stored.quantized, bounds)
    if not (scale.isfinite() & (scale >= 0)).all():
        how = stored.quantized
        raise UserError(
            f"{index.folder / how.scale_file}: scale {how.scale!r} holds values that are not finite or are "
            "below 0; download the checkpoint again"
        )
    return values


def _read(
    open_file: Callable[[str], Any], stored: StoredTensor, how: Quantized, bounds: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """(values, the scales they were made with) of the box between `bounds`."""
    codes, scales = open_file(stored.file).get_slice(how.codes), open_file(how.scale_file)
    if how.format == "mxfp4":
        (e, e_end), (k, k_end), (n, n_end) = bounds
        group, group_end = k // MX_GROUP, -(-k_end // MX_GROUP)
        bytes_ENGB = codes[e:e_end, n:n_end, group:group_end]
        exponent = scales.get_slice(how.scale)[e:e_end, n:n_end, group:group_end].int()
        pairs = torch.stack((bytes_ENGB & 0x0F, bytes_ENGB >> 4), -1).flatten(-2)  # low half first
        values = torch.ldexp(_FP4[pairs.int()], exponent[..., None] - 127).flatten(-2)
        first = group * MX_GROUP
        values = values[..., k - first : k_end - first].transpose(1, 2)
        return values, torch.where(exponent == _NO_EXPONENT, torch.nan, 1.0)
    (row, row_end), (column, column_end) = bounds
    height, width = how.block
    here = (slice(row // height, -(-row_end // height)), slice(column // width, -(-column_end // width)))
    if len(scales.get_slice(how.scale).get_shape()) == 2:
        scale = scales.get_slice(how.scale)[here].float()
    else:  # one, or one for each row
        grid = (-(-stored.shape[0] // height), -(-stored.shape[1] // width))
        scale = scales.get_tensor(how.scale).float().reshape(grid)[here]
    expanded = scale[torch.arange(row, row_end) // height - here[0].start]
    if scale.shape[1] > 1:
        expanded = expanded[:, torch.arange(column, column_end) // width - here[1].start]
    if how.format == "int4":
        first = column // PACKED
        packed = codes[row:row_end, first : -(-column_end // PACKED)]
        nibbles = (packed.unsqueeze(2) >> (4 * torch.arange(PACKED, dtype=torch.int32))) & 15
        begin = first * PACKED
        values = nibbles.flatten(1)[:, column - begin : column_end - begin].float() - 8
    else:
        values = codes[row:row_end, column:column_end].float()
    return values.mul_(expanded), scale
