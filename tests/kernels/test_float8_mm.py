"""The float8 GEMMs against float64: within what rounding a float32 sum allows."""

import pytest
import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import block_scaled_mm, layer_handle, record_gemms, scaled_mm
from lptune.numerics import E4M3, E5M2, Format
from tests.proofs import noise

NO_LAYER = layer_handle(-1)
SHAPES = [(1, 16, 16), (3, 5, 7), (33, 160, 70), (64, 300, 32)]


def _matrix(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def _assert_sums_in_float32(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """|error| <= (K + 3) * 2**-24 * (|a| @ |b|): K products and sums, two scales and the result each rounded
    (Higham, Accuracy and Stability, section 3.1).
    """
    truth, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((actual.double() - truth).abs() <= (a.shape[1] + 3) * 2.0**-24 * size).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt_a", [E4M3, E5M2])
def test_rows_and_tensor_scales(shape: tuple[int, int, int], fmt_a: Format) -> None:
    m, k, n = shape
    a, b = _matrix(m, k, 0), _matrix(k, n, 1)
    for a8, b8 in (
        (numerics.quantize_rows(a, fmt_a), numerics.quantize_columns(b, E4M3)),
        (numerics.quantize_tensor(a, fmt_a), numerics.quantize_tensor(b, E4M3)),
    ):
        out = scaled_mm(a8[0], b8[0], a8[1], b8[1], torch.float32, NO_LAYER, 0, emulate=True)
        _assert_sums_in_float32(out, numerics.dequantize(a8), numerics.dequantize(b8))
        rounded = scaled_mm(a8[0], b8[0], a8[1], b8[1], torch.bfloat16, NO_LAYER, 0, emulate=True)
        assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_128(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = _matrix(m, k, 0), _matrix(k, n, 1)
    a8 = numerics.quantize_blocks(a, (1, 128), E4M3)
    for block in ((128, 128), (128, 1)):
        b8 = numerics.quantize_blocks(b, block, E4M3)
        out = block_scaled_mm(a8.q_MK, b8.q_MK, a8.scale, b8.scale, 128, torch.float32, NO_LAYER, 0)
        deq_a, deq_b = numerics.dequantize_blocks(a8, (1, 128)), numerics.dequantize_blocks(b8, block)
        _assert_sums_in_float32(out, deq_a, deq_b)
        assert 0.001 < noise.relative_error(out, a.double() @ b.double()) < 0.1  # float8 it was


@pytest.mark.parametrize("shape", SHAPES)
def test_mx_blocks(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = numerics.quantize_mx(_matrix(m, k, 0), 1), numerics.quantize_mx(_matrix(k, n, 1), 0)
    out = block_scaled_mm(a.q_MK, b.q_MK, a.scale, b.scale, 32, torch.float32, NO_LAYER, 0)
    plain = numerics.dequantize_blocks(a, (1, 32)), numerics.dequantize_blocks(b, (32, 1))
    _assert_sums_in_float32(out, *plain)


def test_a_nan_scale_comes_out_as_nan() -> None:
    x = _matrix(4, 64, 0)
    x[2, 3] = torch.inf
    a, b = numerics.quantize_blocks(x, (1, 32), E4M3), numerics.quantize_blocks(x.t(), (32, 1), E4M3)
    out = block_scaled_mm(a.q_MK, b.q_MK, a.scale, b.scale, 32, torch.float32, NO_LAYER, 0)
    assert out[2].isnan().all()
    assert out[:, 2].isnan().all()
    others = [0, 1, 3]
    assert out[others][:, others].isfinite().all()
    mx_a, mx_b = numerics.quantize_mx(x, 1), numerics.quantize_mx(x.t(), 0)
    out = block_scaled_mm(mx_a.q_MK, mx_b.q_MK, mx_a.scale, mx_b.scale, 32, torch.float32, NO_LAYER, 0)
    assert out[2].isnan().all()
    assert out[others][:, others].isfinite().all()


def test_wrong_shapes_are_named() -> None:
    a, b = numerics.quantize_blocks(_matrix(4, 64, 0), (1, 32), E4M3), _matrix(64, 8, 1)
    q, scale = numerics.quantize_blocks(b, (32, 1), E4M3)
    arguments = (torch.float32, NO_LAYER, 0)
    with pytest.raises(ValueError, match=r"\(M, K\) and \(K, N\), got \(4, 64\) and \(8, 64\)"):
        block_scaled_mm(a.q_MK, q.t(), a.scale, scale, 32, *arguments)
    with pytest.raises(ValueError, match=r"scale_a of shape \(4, 2\), got \(4, 1\)"):
        block_scaled_mm(a.q_MK, q, a.scale[:, :1], scale, 32, *arguments)
    with pytest.raises(ValueError, match=r"scale_b of shape \(2, 8\) or \(2, 1\), got \(1, 8\)"):
        block_scaled_mm(a.q_MK, q, a.scale, scale[:1], 32, *arguments)


def test_executions_are_counted_and_opcheck_passes() -> None:
    a, b = numerics.quantize_mx(_matrix(16, 64, 0), 1), numerics.quantize_mx(_matrix(64, 32, 1), 0)
    with record_gemms() as executed:
        block_scaled_mm(a.q_MK, b.q_MK, a.scale, b.scale, 32, torch.bfloat16, layer_handle(7), 2)
    assert executed == {(7, 2): 1}
    args = (a.q_MK, b.q_MK, a.scale, b.scale, 32, torch.bfloat16, NO_LAYER, 1, False)
    # Not test_schema: it multiplies the inputs, which torch cannot do in float8.
    tests = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.lptune.block_scaled_mm.default, args, test_utils=tests)
