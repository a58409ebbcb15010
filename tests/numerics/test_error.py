"""Predicted quantization noise against measured, for every format and everything that can share a scale."""

import math

import pytest
import torch

from lptune import numerics
from lptune.numerics import FORMATS, MX_BLOCK, Format
from tests.proofs.noise import predicted_block_error, relative_error

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
M, K = 256, 384
BLOCKS = [(1, K), (M, 1), (M, K), (1, 128), (128, 1), (128, 128), (1, MX_BLOCK), (MX_BLOCK, 1), (24, 56)]


@pytest.mark.parametrize("power_of_two", [False, True], ids=["ratio", "power_of_two"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block[0]}x{block[1]}")
@every_format
def test_measured_noise_is_the_predicted(fmt: Format, block: tuple[int, int], power_of_two: bool) -> None:
    # Evenly distributed values fall evenly into every step, which is what the prediction assumes.
    x = torch.rand(M, K, generator=torch.Generator().manual_seed(M)) * 2 - 1
    quantized = numerics.quantize_blocks(x, block, fmt, power_of_two=power_of_two)
    measured = relative_error(numerics.dequantize_blocks(quantized, block), x)
    predicted = predicted_block_error(x, block, fmt, power_of_two=power_of_two)

    # Without a power of two each scale has one element, its amax, that is a number of the format: no noise.
    scale_MK = numerics.expand_blocks(quantized.scale, block, (M, K)).double()
    steps = scale_MK * fmt.spacing(x.double() / scale_MK)
    amax_MK = scale_MK * fmt.max * (1 - 2.0**-22)
    noisy = torch.ones(M, K, dtype=torch.bool) if power_of_two else x.abs() < amax_MK
    assert int((~noisy).sum()) == (0 if power_of_two else quantized.scale.numel())
    expected = predicted * float(steps[noisy].norm() / steps.norm())
    # A squared error is (step * u)**2 with u even in [-1/2, 1/2]: mean 1 / 12, standard deviation
    # sqrt(4 / 5) / 12. The norm is a root, which halves the relative spread; 4 of it.
    spread = math.sqrt(0.8) * float(steps.square().norm() / steps.square().sum()) / 2
    assert measured == pytest.approx(expected, rel=4 * spread)
    assert measured <= predicted * (1 + 4 * spread)


def test_beside_an_outlier_float8_keeps_what_int8_loses() -> None:
    # Half a percent of the outlier: less than INT8's half step of 1 / 254 of it, 9 binades above e4m3's
    # smallest step. The prediction is an upper bound for what is lost altogether.
    x = torch.full((1, 64), 0.003)
    x[0, 5] = 1.0
    errors = {
        name: float((numerics.dequantize(numerics.quantize_rows(x, fmt))[0, 0] - 0.003).abs() / 0.003)
        for name, fmt in FORMATS.items()
    }
    assert errors["int8"] == pytest.approx(1, rel=1e-6)
    assert errors["e4m3"] <= 2.0**-4  # half a step of a number with 3 bits after the leading one
    assert errors["e5m2"] <= 2.0**-3
