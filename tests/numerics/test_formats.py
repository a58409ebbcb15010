"""All 256 values of each 8-bit format, and rounding to them, against a table decoded by hand."""

import itertools
import math

import pytest
import torch

from lptune import numerics
from lptune.numerics import FORMATS, INT8, Format, round_to, to_e8m0
from lptune.numerics.formats import INT32_SAFE_CONTRACTION
from tests.helpers import numerics_oracle as oracle

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
BYTES = torch.arange(256, dtype=torch.uint8)


def _numbers(fmt: Format) -> torch.Tensor:
    return torch.tensor(oracle.numbers(fmt), dtype=torch.float64)


@every_format
def test_every_byte_is_the_number_of_the_specification(fmt: Format) -> None:
    ours = BYTES.view(fmt.dtype).to(torch.float64).tolist()
    for bits, value in enumerate(ours):
        expected = oracle.decode(fmt, bits)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), hex(bits)


@every_format
def test_max_is_the_largest_finite_number_and_the_constants_follow_from_the_bits(fmt: Format) -> None:
    finite = [abs(v) for v in (oracle.decode(fmt, bits) for bits in range(256)) if math.isfinite(v)]
    if fmt.mantissa_bits is None:
        # -128 is left out: a value and its negative must quantize alike. A format may use fewer steps.
        assert fmt.max == int(fmt.max) <= 127
    else:
        assert fmt.max == max(finite)
    assert INT8.max == 127
    assert fmt.max == oracle.numbers(fmt)[-1] == -oracle.numbers(fmt)[0]
    if fmt.mantissa_bits is not None:
        # The subnormals and the first binade share the smallest step.
        smallest = min(v for v in finite if v > 0)
        assert smallest == 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        assert len([v for v in oracle.numbers(fmt) if 0 < v < 2 ** (fmt.min_exponent + 1)]) == (
            2 ** (fmt.mantissa_bits + 1) - 1
        )


def test_the_longest_safe_contraction_is_the_longest() -> None:
    worst = 127 * 127
    assert worst * INT32_SAFE_CONTRACTION < 2**31 <= worst * (INT32_SAFE_CONTRACTION + 1)


@every_format
def test_rounding_is_to_nearest_even_everywhere(fmt: Format) -> None:
    # Rounding is monotone, so it is right everywhere if it is right at every number, at every boundary
    # between neighbours, and one float32 to either side of it.
    boundaries = torch.tensor(oracle.boundaries(fmt), dtype=torch.float64)
    exact = boundaries.to(torch.float32)
    assert torch.equal(exact.to(torch.float64), boundaries)
    inf = torch.full_like(exact, math.inf)
    points = torch.cat((_numbers(fmt).float(), exact, exact.nextafter(inf), exact.nextafter(-inf)))
    assert torch.equal(round_to(points, fmt).to(torch.float64), oracle.nearest_even(fmt, points))


@every_format
def test_rounding_saturates_beyond_the_format(fmt: Format) -> None:
    beyond = torch.tensor([fmt.max, fmt.max * 1.04, fmt.max * 1.5, 3e38, math.inf])
    assert (round_to(beyond, fmt).double() == fmt.max).all()
    assert (round_to(-beyond, fmt).double() == -fmt.max).all()


@every_format
def test_spacing_is_the_distance_of_the_two_neighbours(fmt: Format) -> None:
    # At a number itself, the distance to the neighbour away from zero; inside a cell, the cell's width.
    table = oracle.numbers(fmt)
    cells = [(low, high) for low, high in itertools.pairwise(table) if low >= 0]
    widths = torch.tensor([high - low for low, high in cells], dtype=torch.float64)
    lows = torch.tensor([low for low, _ in cells], dtype=torch.float64)
    for fraction in (0.0, 2.0**-20, 0.25, 0.5, 1 - 2.0**-20):
        inside = lows + fraction * widths
        assert torch.equal(fmt.spacing(inside), widths), fraction
        assert torch.equal(fmt.spacing(-inside), widths), fraction


@pytest.mark.parametrize("power", [-100, -1, 0, 17, 100])
@every_format
def test_every_number_survives_with_a_power_of_two_scale_bitwise(fmt: Format, power: int) -> None:
    # The row holds max * 2**power, so its scale is exactly 2**power.
    x_1K = (_numbers(fmt) * 2.0**power).float()[None]
    x_K1, k = x_1K.t(), x_1K.shape[1]
    for power_of_two in (False, True):
        keys = {"fmt": fmt, "power_of_two": power_of_two}
        for quantized in (
            numerics.quantize_rows(x_1K, **keys),
            numerics.quantize_tensor(x_1K, **keys),
        ):
            assert float(quantized[1]) == 2.0**power
            assert torch.equal(numerics.dequantize(quantized), x_1K)
        assert torch.equal(numerics.dequantize(numerics.quantize_columns(x_K1, **keys)), x_K1)
        blocks = numerics.quantize_blocks(x_1K, (1, k), **keys)
        assert torch.equal(numerics.dequantize_blocks(blocks, (1, k)), x_1K)
    q = numerics.round_to(x_1K * 2.0**-power, fmt)
    assert torch.equal(q.double(), _numbers(fmt)[None])


@every_format
def test_every_number_survives_with_any_scale(fmt: Format) -> None:
    # x = number * scale is rounded to float32, the product with the inverse again: 3 roundings of 2**-24 at
    # most, while the next number is at least 2**-3 of it (or 1 of 127) away.
    scale_M1 = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) * 3 + 0.1
    x_MK = _numbers(fmt).float() * scale_M1
    rows = numerics.quantize_rows(x_MK, fmt)
    assert torch.equal(rows.q_MK.double(), _numbers(fmt).expand(200, -1))
    again = numerics.quantize_rows(numerics.dequantize(rows), fmt)
    assert torch.equal(again.q_MK.double(), rows.q_MK.double())


def test_all_256_scales_of_e8m0_round_trip() -> None:
    scales = BYTES.view(torch.float8_e8m0fnu).to(torch.float32)
    # Decoded by hand: 2**(bits - 127), which float32 holds even at 2**-127, as a subnormal.
    expected = [math.ldexp(1.0, bits - 127) for bits in range(255)]
    assert scales[:255].tolist() == expected
    assert scales[255].isnan()
    assert torch.equal(to_e8m0(scales).view(torch.uint8), BYTES)
