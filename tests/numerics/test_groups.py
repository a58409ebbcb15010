"""Four bits by groups of 32 columns: against float64, at the edges, and as training's gradient sees them."""

import pytest
import torch
from torch import Tensor, nn

from lptune import linear
from lptune.numerics import dequantize_groups, quantize_groups


def _definition(w_NK: Tensor) -> Tensor:
    """q * scale in float64, group by group."""
    found = torch.empty_like(w_NK, dtype=torch.float64)
    for group in range(0, w_NK.shape[1], 32):
        part = w_NK[:, group : group + 32]
        scale = (part.abs().amax(1, keepdim=True).float() / 7).bfloat16().double()
        scale[scale == 0] = 1
        found[:, group : group + 32] = (part.double() / scale).round().clamp(-7, 7) * scale
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(48, 160), (1, 32), (5, 77), (3, 8), (0, 32)])
def test_it_is_the_definition_for_whole_and_shorter_groups(dtype: torch.dtype, n: int, k: int) -> None:
    w_NK = (torch.randn(n, k, generator=torch.Generator().manual_seed(k)) * 0.02).to(dtype)
    quantized = quantize_groups(w_NK)
    assert quantized.q_NK.dtype == torch.int8
    assert quantized.scale_NG.shape == (n, -(-k // 32))
    assert torch.equal(quantized.scale_NG, quantized.scale_NG.bfloat16().float())
    found, step_NK = dequantize_groups(quantized, torch.float32), quantized.scale_NG.repeat_interleave(32, 1)
    wanted = _definition(w_NK)
    # A quotient near a tie may round to either side in float32; else the product of code and scale is exact.
    tie = ((w_NK.double() / step_NK[:, :k]) % 1 - 0.5).abs() < 1e-5
    assert torch.equal(found[~tie].double(), wanted[~tie])
    # Half a step, and what the scale's rounding to bfloat16 takes from the amax.
    assert ((found - w_NK.float()).abs() <= step_NK[:, :k] * (0.5 + 7 * 2.0**-8)).all()
    assert torch.equal(dequantize_groups(quantize_groups(-w_NK), torch.float32), -found)
    codes = quantize_groups(found)  # what is rounded already stays
    assert torch.equal(dequantize_groups(codes, torch.float32), found)


def test_values_that_are_not_finite_spoil_their_group_alone_and_zeros_stay() -> None:
    w_NK = torch.randn(4, 96)
    w_NK[0, 5], w_NK[1, 40], w_NK[2], w_NK[3, :32] = torch.nan, -torch.inf, 0, 1e-44
    found = dequantize_groups(quantize_groups(w_NK), torch.bfloat16)
    spoilt = torch.zeros_like(found, dtype=torch.bool)
    spoilt[0, :32], spoilt[1, 32:64] = True, True
    assert torch.equal(found.isnan(), spoilt)
    assert (found[2] == 0).all()
    assert (found[3, :32].abs() <= 2e-44).all()


def test_gradients_are_those_of_the_rounded_function_passed_straight_through() -> None:
    torch.manual_seed(0)
    layer, x_TK, g_TN = nn.Linear(96, 48), torch.randn(24, 96), torch.randn(24, 48)
    w64, x64 = layer.weight.detach().double().requires_grad_(), x_TK.double().requires_grad_()
    rounded = w64 + (_definition(layer.weight.detach()) - w64).detach()
    assert layer.bias is not None
    truth = x64 @ rounded.t() + layer.bias.detach().double()
    truth.backward(g_TN.double())
    linear.convert(layer, "int4_weight")
    x = x_TK.clone().requires_grad_()
    out = layer(x)
    out.backward(g_TN)
    for found, wanted, num_terms in (
        (out, truth, 96),
        (x.grad, x64.grad, 48),
        (layer.weight.grad, w64.grad, 24),
    ):
        # Sums in float32 of as many products.
        assert found is not None
        assert wanted is not None
        assert (found.double() - wanted).norm() <= num_terms * 2.0**-24 * wanted.norm()
    high = x_TK @ layer.weight.detach().t() + layer.bias.detach()
    assert (out - high).norm() > 0.05 * high.norm()  # 4 bits
