"""What quantizers by known amaxes, and with stochastic rounding, must give: from their definitions."""

import math

import torch
from torch import Tensor

from lptune import numerics
from lptune.numerics import FORMATS, Format
from tests.helpers.hard_rows import hard_to_round

BLOCKS = [(None, 0), (16, 12), (128, 130), (20, 40)]
"""(side of a block, the first row)."""

SALTS = {1: 0, 0: 0x5DEECE66D, 2: 0x2545F4914F6CDD1D >> 1}
DIMS: dict[int, int | tuple[int, int]] = {1: 1, 0: 0, 2: (0, 1)}


def rows_with_all_magnitudes(fmt: str) -> Tensor:
    """Rows of all magnitudes; in float8 with inf and NaN, which INT8 does not specify."""
    hard = hard_to_round(70)
    x = torch.cat([torch.randn(40, 70, generator=torch.Generator().manual_seed(0)), hard[::16], hard[255:]])
    x[3] = 0
    return x if FORMATS[fmt].mantissa_bits is not None else x.nan_to_num(1.5, 2.5, -3.5)


def some_amaxes(block: int | None, first_row: int, m: int, k: int) -> Tensor:
    """With blocks: also such as x has no part in, one of zero and one that is not finite."""
    if block is None:
        return torch.full((1, 1), 1.7)
    amax = torch.rand(-(-(first_row + m) // block) + 2, -(-k // block)) * 3
    amax[first_row // block, -1], amax[-3, 0] = 0, math.inf
    return amax


def expected_by_amax(
    x: Tensor, amax: Tensor, form: Format, power_of_two: bool, block: int | None, first_row: int
) -> tuple[Tensor, Tensor]:
    """The definition, element by element: x * inverse, where inf is NaN in float8."""
    scale, inverse = numerics.scale_from_amax(amax, form, power_of_two)
    rows, columns = torch.arange(len(x)) + first_row, torch.arange(x.shape[1])
    side = block or 10**6
    by = inverse[(rows // side)[:, None] if block else 0, (columns // side)[None, :]]
    x32 = x.float()
    if form.mantissa_bits is not None:
        x32 = torch.where(x32.isinf(), math.nan, x32)
    return numerics.round_to(x32 * by, form), scale


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Bit for bit, but for the code of NaN: which one arithmetic returns, IEEE 754 leaves open."""
    assert ours.dtype == expected.dtype
    is_nan = expected.float().isnan()
    assert torch.equal(ours.float().isnan(), is_nan)
    known = [each.contiguous().cpu()[~is_nan] for each in (ours, expected)]
    assert torch.equal(*(each.view(torch.uint8) for each in known))


def hard_matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of zeros, with an outlier, at the edges of float32, and of numbers between two neighbours."""
    x = torch.randn(33, 70, generator=torch.Generator().manual_seed(0))
    x[3], x[4, 5] = 0, 1e3
    x[5] *= 1e-37
    x[6] *= 1e-44
    x[7] *= 3e37
    x[8] = torch.arange(70) - 35.5
    x[8, 0] = 127.0
    x[:, 2] = 0
    return x.to(dtype)


def expected_stochastic(
    x: Tensor, form: Format, power_of_two: bool, dim: int, key: int, first: int
) -> tuple[Tensor, Tensor]:
    """The definition. x: times its multiplier already."""
    scale, inverse = numerics.find_scale(x, DIMS[dim], form, power_of_two)
    index = torch.arange(first, first + x.numel()).view(x.shape)
    random = numerics.uniform(key, index)
    return numerics.stochastic_round_to(x.float() * inverse, form, random), scale
