"""Ternary weights: the definition of BitNet b1.58, its scale from the sums of rows, and its packing."""

import math

import pytest
import torch
from torch import Tensor, nn

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.numerics import (
    dequantize,
    pack_ternary,
    quantize_ternary,
    server_scale,
    sums_of_rows,
    ternary_scale,
    unpack_ternary,
)


def _weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.02).to(dtype)


def _definition(w_NK: Tensor) -> tuple[Tensor, float]:
    """(codes in float64, r), by the formulas of numerics/ternary.py, with a mean that nothing rounds."""
    total = math.fsum(w_NK.double().abs().flatten().tolist())
    r = float(torch.tensor(w_NK.numel() / total, dtype=torch.float64).bfloat16())
    return (w_NK.double() * r).round().clamp(-1, 1), r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(48, 160), (1, 4), (5, 77), (300, 1)])
def test_it_is_the_definition(dtype: torch.dtype, n: int, k: int) -> None:
    w_NK = _weight(n, k, dtype)
    wanted, r = _definition(w_NK)
    q_NK, scale_11 = quantize_ternary(w_NK)
    assert q_NK.dtype == torch.int8
    assert torch.equal(q_NK.double(), wanted)
    assert float(server_scale(scale_11)) == r
    assert scale_11.dtype == torch.float32
    assert float(scale_11) == float(torch.tensor(1 / r, dtype=torch.float32))
    assert wanted.unique().numel() == 3 or n * k < 8


def test_rows_of_any_number_of_ranks_have_the_scale_and_the_codes_of_the_whole() -> None:
    w_NK = _weight(96, 64, torch.bfloat16)
    w_NK[70:] *= 50  # a rank's own mean would be another
    whole = quantize_ternary(w_NK)
    for num_ranks in (2, 3, 5):
        parts = w_NK.chunk(num_ranks)
        sums_N1 = torch.cat([sums_of_rows(part) for part in parts])
        assert torch.equal(sums_N1, sums_of_rows(w_NK))
        scale_11 = ternary_scale(sums_N1, 64)
        codes = [quantize_ternary(part, scale_11).q_MK for part in parts]
        assert torch.equal(scale_11, whole.scale_11)
        assert torch.equal(torch.cat(codes), whole.q_MK)


def test_each_scale_gives_back_the_number_of_bfloat16_that_it_is_the_inverse_of() -> None:
    """So an export stores training's own scale: the 128 numbers of each of some powers of two."""
    r = torch.tensor([(128 + m) * 2.0**e for e in (-20, -7, 0, 13) for m in range(128)])
    assert torch.equal(server_scale(1 / r), r)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_spoils_the_weight(bad: float) -> None:
    w_NK = _weight(16, 32)
    w_NK[3, 5] = bad
    assert dequantize(quantize_ternary(w_NK)).isnan().all()


def test_zeros_stay_zeros() -> None:
    for w_NK in (torch.zeros(16, 32), torch.full((16, 32), 1e-42)):
        q_NK, scale_11 = quantize_ternary(w_NK)
        assert (dequantize((q_NK, scale_11)) == 0).all()  # type: ignore[arg-type]
        assert not q_NK.any()
        assert float(server_scale(scale_11)) == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_a_byte_has_four_codes_and_gives_them_back(dim: int) -> None:
    q = quantize_ternary(_weight(32, 48)).q_MK
    packed = pack_ternary(q, dim)
    assert packed.dtype == torch.uint8
    assert packed.numel() == q.numel() // 4
    assert torch.equal(unpack_ternary(packed, dim), q)


def test_packed_rows_are_those_of_transformers() -> None:
    from transformers.integrations.bitnet import pack_weights

    q_NK = quantize_ternary(_weight(32, 48)).q_MK
    assert torch.equal(pack_ternary(q_NK, 0), pack_weights(q_NK.clone()))


@pytest.mark.parametrize("how", ["high", "folded"])
def test_gradients_are_those_of_the_rounded_function_passed_straight_through(how: str) -> None:
    """Of `folded` up to the rounding of g to INT8, about 1 %; else of sums in float32."""
    torch.manual_seed(0)
    layer, x_TK, g_TN = nn.Linear(96, 48), torch.randn(32, 96), torch.randn(32, 48)
    if how == "high":
        x_TK[3, 7] = 40.0  # its token is coarse, and folded into g it would outweigh the others
    w64, x64 = layer.weight.detach().double().requires_grad_(), x_TK.double().requires_grad_()
    codes, r = _definition(layer.weight.detach())
    scale_T1 = (x_TK.abs().amax(1, keepdim=True).double() / 127).float().double()
    rounded_x = (x64 / scale_T1).round() * scale_T1
    assert layer.bias is not None
    straight_x = x64 + (rounded_x - x64).detach()
    truth = straight_x @ (w64 + (codes / r - w64).detach()).t() + layer.bias.detach().double()
    truth.backward(g_TN.double())
    linear.convert(layer, PrecisionConfig(kind="bitnet", grad_input=how, grad_weight=how))
    x = x_TK.clone().requires_grad_()
    out = layer(x)
    out.backward(g_TN)
    for found, wanted, num_terms in (
        (out, truth, 96),
        (x.grad, x64.grad, 48),
        (layer.weight.grad, w64.grad, 32),
    ):
        assert found is not None
        assert wanted is not None
        limit = num_terms * 2.0**-24 if how == "high" or found is out else 0.02
        error = float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())
        assert error <= limit
        assert how == "high" or found is out or error > 1e-3
    high = x_TK @ layer.weight.detach().t() + layer.bias.detach()
    assert (out - high).norm() > 0.3 * high.norm()  # three values
