"""Quantizing by amaxes that are known before: on a CPU, every backend gives the bits of lptune.numerics."""

import itertools
import math

import pytest
import torch

from lptune import kernels, numerics
from lptune.kernels import LIVE, LayerAmaxes
from lptune.numerics import FORMATS
from tests.helpers.definitions import (
    BLOCKS,
    assert_same,
    expected_by_amax,
    rows_with_all_magnitudes,
    some_amaxes,
)

pytestmark = pytest.mark.usefixtures("cpu_quantizers")


@pytest.mark.parametrize(("block", "first_row"), BLOCKS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_by_known_amaxes_the_bits_are_those_of_the_definition(
    fmt: str, block: int | None, first_row: int
) -> None:
    x, form = rows_with_all_magnitudes(fmt), FORMATS[fmt]
    amax = some_amaxes(block, first_row, *x.shape)
    for power_of_two, dtype in itertools.product(
        (False, True), (torch.float32, torch.bfloat16, torch.float16)
    ):
        rounded = x.to(dtype)
        expected = expected_by_amax(rounded, amax, form, power_of_two, block, first_row)
        for given, rounded_to in ((rounded, None), (x, dtype), (x.t().contiguous().t(), dtype)):
            ours = kernels.quantize_by_amax(
                given,
                amax,
                fmt,
                power_of_two=power_of_two,
                block=block,
                first_row=first_row,
                rounded_to=rounded_to,
            )
            assert_same(ours[0], expected[0])
            assert_same(ours[1], expected[1])
            assert ours[0].is_contiguous()


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_a_power_of_two_is_kept_and_the_next_number_goes_to_the_next_power(fmt: str) -> None:
    for quotient, power in ((0.25, 0.25), (0.25 * (1 + 2.0**-23), 0.5), (0.25 * (1 - 2.0**-24), 0.25)):
        amax = torch.tensor([[FORMATS[fmt].max * quotient]])
        if float((amax.double() / FORMATS[fmt].max).float()) == quotient:  # else it is no float32
            _, scale = kernels.quantize_by_amax(torch.ones(2, 2), amax, fmt, power_of_two=True)
            assert scale.item() == power


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 700), (33, 17)])
def test_matrices_of_any_size_are_quantized_by_a_known_amax(shape: tuple[int, int]) -> None:
    x, amax = torch.randn(shape), torch.ones(1, 1)
    for fmt, form in FORMATS.items():
        q, scale = kernels.quantize_by_amax(x, amax, fmt)
        assert_same(q, expected_by_amax(x, amax, form, False, None, 0)[0])
        assert scale.shape == (1, 1)


@pytest.mark.parametrize(("block", "above"), [(16, 12), (20, 0), (128, 5), (8, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_amax_of_each_block_is_that_of_its_elements(dtype: torch.dtype, block: int, above: int) -> None:
    x = torch.randn(45, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[40, 60], x[20:, :] = -50, x[20:, :] * 1e-3
    for given in (x, x.t().contiguous().t(), x[:1], x[:0]):
        ours = kernels.block_amaxes(given, block, above)
        assert ours.shape == (-(-(above + len(given)) // block), -(-70 // block))
        for i, j in itertools.product(*map(range, ours.shape)):
            part = given[max(i * block - above, 0) : (i + 1) * block - above, j * block : (j + 1) * block]
            assert ours[i, j] == (part.abs().max() if part.numel() else 0)
    for bad in (math.inf, math.nan):
        x[3, 3] = bad
        ours = kernels.block_amaxes(x, block, above)
        assert ours[(3 + above) // block, 3 // block].equal(torch.tensor(bad)) or math.isnan(bad)
        assert ours.isnan().sum() == math.isnan(bad)
        assert (~ours.isfinite()).sum() == 1


@pytest.mark.parametrize("operand", ["x", "w", "g"])
@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("past", [0.0, 1.5])
def test_delayed_scaling_quantizes_by_the_past_and_measures_the_present(
    fmt: str, past: float, operand: str
) -> None:
    form, index = FORMATS[fmt], kernels.OPERANDS.index(operand)
    number = LIVE.enter()
    amaxes = LayerAmaxes(torch.zeros(3), torch.zeros(3), lambda: True)
    LIVE[number].amaxes, handle = amaxes, kernels.layer_handle(number)
    amaxes.past_3[index] = past
    for dtype, before in itertools.product((torch.bfloat16, torch.float32, torch.float16), (0.25, 9.0)):
        x = (torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
        amax = x.float().abs().max()
        scale, inverse = numerics.scale_from_amax(torch.tensor(past) if past else amax, form)
        expected = numerics.round_to(x.float() * inverse, form)
        for transposed in (False, True):
            amaxes.current_3[:] = torch.tensor([before] * 3)
            q, own = kernels.quantize_delayed(x, fmt, handle, operand, transposed=transposed)
            plain, by_columns = kernels.quantize_delayed_both_ways(x, fmt, handle, operand)
            for each in (q, plain.q_MK, by_columns):
                assert_same(each, expected)
            assert own.item() == plain.scale_11.item() == scale.item()
            assert (q.t() if transposed else q).is_contiguous()
            assert plain.q_MK.is_contiguous()
            assert by_columns.t().is_contiguous()
            others = [before] * 3
            others[index] = amax.item() if operand == "w" else max(before, amax.item())
            assert amaxes.current_3.tolist() == others
    LIVE.leave(number)


@pytest.mark.parametrize("past", [0.0, 1.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_delayed_scaling_of_what_is_not_finite_has_no_scale_and_is_measured(bad: float, past: float) -> None:
    number = LIVE.enter()
    amaxes = LayerAmaxes(torch.full((3,), past), torch.ones(3), lambda: True)
    LIVE[number].amaxes = amaxes
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    x[2, 5] = bad
    assert kernels.quantize_delayed(x, "e4m3", kernels.layer_handle(number), "x").scale_11.isnan()
    assert not amaxes.current_3[0].isfinite()
    assert amaxes.current_3[1:].tolist() == [1, 1]
    LIVE.leave(number)
