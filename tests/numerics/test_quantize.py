"""INT8 quantization against float64, with bounds from the format."""

import math

import pytest
import torch

from lptune.numerics import INT8, dequantize, quantize_columns, quantize_rows
from tests.proofs import noise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _matrix(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 33), (64, 128)])
def test_every_element_lies_within_half_a_step(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = _matrix(*shape, dtype)
    for quantized in (quantize_rows(x), quantize_columns(x)):
        q, scale = quantized
        assert q.dtype == torch.int8
        assert scale.dtype == torch.float32
        error = (q.double() * scale.double() - x.double()).abs()
        # Half a step, and the float32 rounding of x / scale (127 * 2**-24 steps).
        assert (error <= scale.double() * (0.5 + 1e-5)).all()


def test_columns_of_a_matrix_are_rows_of_its_transpose() -> None:
    x = _matrix(12, 20, torch.float32)
    rows, columns = quantize_rows(x.t()), quantize_columns(x)
    assert torch.equal(rows.q_MK.t(), columns.q_MK)
    assert torch.equal(rows.scale_M1.t(), columns.scale_1K)


def test_amax_maps_to_127_and_minus_128_never_occurs() -> None:
    x = _matrix(200, 50, torch.float32)
    q = quantize_rows(x).q_MK
    assert (q.abs().amax(dim=1) == 127).all()
    assert int(q.min()) >= -127
    assert torch.equal(quantize_rows(-x).q_MK, -q)


def test_zero_rows_stay_zero_and_finite() -> None:
    x = _matrix(4, 8, torch.float32)
    x[2] = 0
    q, scale = quantize_rows(x)
    assert (q[2] == 0).all()
    assert scale.isfinite().all()
    assert (dequantize(quantize_rows(x))[2] == 0).all()


def test_an_outlier_coarsens_its_own_row_only() -> None:
    x = _matrix(8, 64, torch.float32)
    clean = quantize_rows(x)
    x[3, 5] = 1e4
    dirty = quantize_rows(x)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(clean.q_MK[others], dirty.q_MK[others])
    assert torch.equal(clean.scale_M1[others], dirty.scale_M1[others])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_comes_out_as_nan(bad: float) -> None:
    x = _matrix(4, 8, torch.float32)
    x[1, 2] = bad
    rows = dequantize(quantize_rows(x))
    assert rows[1].isnan().all()
    assert rows[[0, 2, 3]].isfinite().all()
    assert dequantize(quantize_columns(x))[:, 2].isnan().all()


def test_tiny_float16_keeps_its_scale() -> None:
    # A scale kept in float16 underflows: 1e-6 / 127 is below its smallest subnormal, 6e-8.
    x = torch.full((2, 8), 1e-6, dtype=torch.float16)
    assert noise.relative_error(dequantize(quantize_rows(x)), x) < 1e-6


@pytest.mark.parametrize("magnitude", [1e-10, 1e-30, 1e-35])
def test_small_gradients_keep_their_signal_to_noise(magnitude: float) -> None:
    x = _matrix(32, 256, torch.float32)
    expected = noise.sqnr_db(dequantize(quantize_rows(x)), x)
    scaled = x * magnitude
    # Only the rounding of the product differs; a flipped rounding here and there is far below 0.1 dB.
    assert abs(noise.sqnr_db(dequantize(quantize_rows(scaled)), scaled) - expected) < 0.1


@pytest.mark.parametrize("magnitude", [1e-37, 1e-38, 1e-42, 2.0**-149])
def test_below_the_smallest_scale_an_element_is_still_within_half_of_it(magnitude: float) -> None:
    x = _matrix(32, 256, torch.float32) * magnitude
    q, scale = quantize_rows(x)
    assert (scale[x.abs().amax(dim=1) > 0] >= 2.0**-126).all()  # its inverse is finite
    assert int(q.abs().max()) <= 127
    assert ((q.double() * scale.double() - x.double()).abs() <= scale.double() * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_measured_error_equals_the_predicted_noise(dim: int) -> None:
    x = _matrix(512, 512, torch.float32)
    quantized = quantize_rows(x) if dim == 1 else quantize_columns(x)
    measured = noise.relative_error(dequantize(quantized), x)
    predicted = noise.predicted_relative_error(x, dim, INT8)
    # 262,144 roundings: the relative spread of their mean square is about sqrt(0.8 / 262144) = 0.2 %.
    assert measured == pytest.approx(predicted, rel=0.01)


def test_non_contiguous_input_equals_its_contiguous_copy() -> None:
    x = _matrix(20, 30, torch.float32).t()[::2]
    assert not x.is_contiguous()
    for quantize in (quantize_rows, quantize_columns):
        for a, b in zip(quantize(x), quantize(x.contiguous()), strict=True):
            assert torch.equal(a, b)


def test_compiled_quantization_equals_eager_bitwise() -> None:
    x = _matrix(48, 80, torch.bfloat16)
    for quantize in (quantize_rows, quantize_columns):
        compiled = torch.compile(quantize, dynamic=False)(x)
        for a, b in zip(compiled, quantize(x), strict=True):
            assert torch.equal(a, b)


def test_an_exact_copy_has_infinite_sqnr_and_zero_error() -> None:
    x = _matrix(4, 4, torch.float32)
    assert noise.sqnr_db(x, x) == math.inf
    assert noise.relative_error(x, x) == 0
