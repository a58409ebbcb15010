"""The Triton quantizer by known amaxes gives the bits of the reference, for any rows of a larger matrix."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lptune import kernels
from lptune.numerics import FORMATS, expand_blocks
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, same_bits, some_interpreted

from lptune.kernels.triton import by_amax  # isort: skip  # only once there is a device

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
assert poisoned_outputs

CASES = [(fmt, power_of_two) for fmt in FORMATS for power_of_two in (False, True)]
N, K = 150, 140  # of the larger matrix: the last blocks are cut


def _matrix() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


def _amax(x_NK: Tensor, block: int | None) -> Tensor:
    if block is None:
        return x_NK.abs().amax().reshape(1, 1)
    padded = torch.nn.functional.pad(x_NK.abs(), (0, -K % block, 0, -N % block))
    return padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).amax((1, 3))


def _check(
    x_MK: Tensor, amax: Tensor, fmt: str, power_of_two: bool, block: int | None, first_row: int
) -> None:
    """Compares with the op on the CPU, which runs the reference; not where a scale is NaN."""
    ours = by_amax.quantize_by_amax(x_MK.to(DEVICE), amax.to(DEVICE), fmt, power_of_two, block, first_row)
    q, scale = kernels.quantize_by_amax(
        x_MK.cpu(), amax, fmt, power_of_two=power_of_two, block=block, first_row=first_row
    )
    assert same_bits(ours[1].nan_to_num(-1.0), scale.nan_to_num(-1.0))
    assert ours[0].dtype == q.dtype
    assert ours[0].stride() == (x_MK.shape[1], 1)
    spread = scale if block is None else expand_blocks(scale, (block, block), (N, K))[first_row:]
    known = (~spread.isnan()).expand(q.shape) if block is None else ~spread[: len(q)].isnan()
    ours_8, reference_8 = (each.cpu().view(torch.uint8).where(known, 0) for each in (ours[0], q))
    assert torch.equal(ours_8, reference_8)


@pytest.mark.parametrize(("fmt", "power_of_two"), some_interpreted(CASES, CASES[::3]))
@pytest.mark.parametrize("block", [None, 16, 128])
def test_rows_anywhere_in_the_matrix_equal_the_reference(
    fmt: str, power_of_two: bool, block: int | None
) -> None:
    x = _matrix()
    amax = _amax(x, block)
    for first, last in ((0, N), (0, 1), (37, 131), (128, N)):
        _check(x[first:last], amax, fmt, power_of_two, block, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides_equal_the_reference(dtype: torch.dtype) -> None:
    x = _matrix().to(dtype)
    for rows in (x, x.t().contiguous().t(), torch.cat([x, x], dim=1)[:, :K]):
        _check(rows, _amax(x, 128).float(), "e4m3", False, 128, 0)


@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
def test_what_an_amax_does_not_show_saturates_and_what_is_not_a_number_stays_so(fmt: str) -> None:
    x = _matrix()
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = 1e30, -1e30, 2.0**-149, -0.0
    if fmt != "int8":  # there NaN is unspecified
        x[4, 4], x[5, 5], x[6, 6] = math.inf, -math.inf, math.nan
    for amax in (1.0, 1e-38, 1e-44, 3e38, 0.0):
        _check(x, torch.full((1, 1), amax), fmt, False, None, 0)


def test_an_amax_that_is_not_finite_gives_a_scale_of_nan_to_its_block_alone() -> None:
    x = _matrix()
    amax = _amax(x, 16)
    amax[0, 1], amax[3, 2] = math.inf, math.nan
    _check(x, amax, "e4m3", False, 16, 0)


def test_all_scales_are_written_by_few_programs() -> None:
    x = _matrix()[:1, :16]
    amax = torch.rand(40, 30) + 0.1  # 1,200 scales, one program of 16
    _, scale = by_amax.quantize_by_amax(x.to(DEVICE), amax.to(DEVICE), "int8", False, 16, 0)
    assert same_bits(scale, kernels.quantize_by_amax(x, amax, "int8", block=16)[1])


def test_blocks_without_a_tile_are_left_to_the_reference() -> None:
    assert [block for block in (None, 8, 16, 24, 128, 256) if by_amax.has_tile(block)] == [None, 16, 128, 256]
    assert all(by_amax.TILE % width == 0 for width in itertools.chain((16, 32, 64, 128)))
