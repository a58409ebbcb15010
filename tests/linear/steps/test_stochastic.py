"""Stochastic rounding of gradients: right on average, a function of the element's place and nothing else."""

import pytest
import torch
from torch import Tensor, nn

from lptune import linear, numerics
from lptune.config import PrecisionConfig

KINDS = ["int8_rowcol", "int8_tensorwise", "float8_tensorwise", "float8_rowwise"]
T, K, N = 16, 32, 48


def _layer(kind: str, **keys: str) -> tuple[nn.Sequential, linear.Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    emulate = kind.startswith("float8")
    precision = PrecisionConfig(kind=kind, emulate=emulate, stochastic_rounding=True, **keys)  # type: ignore[arg-type]
    return model, linear.convert(model, precision)


def _gradients(model: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x).backward(g)
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert x.grad is not None
    return x.grad, weight.grad


def _batch(num_tokens: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, K, generator=generator), torch.randn(num_tokens, N, generator=generator)


@pytest.mark.parametrize("grad_weight", ["column", "folded"])
def test_the_mean_over_steps_is_the_product_with_the_unrounded_gradient(grad_weight: str) -> None:
    model, plan = _layer("int8_rowcol", grad_weight=grad_weight)
    rounding = linear.StochasticRounding(model, plan, seed=0)
    x, g = _batch()
    num_steps = 400
    sums = [torch.zeros(T, K, dtype=torch.float64), torch.zeros(N, K, dtype=torch.float64)]
    for step in range(num_steps):
        rounding.start(step, 0)
        for total, gradient in zip(sums, _gradients(model, x, g), strict=True):
            total += gradient.double()
    w8 = numerics.quantize_rows(model[0].weight.detach())
    w_NK = numerics.dequantize(w8).double()
    # A GEMM sums step * noise * operand over its contraction; a fraction f rounded at random has the variance
    # f (1 - f) <= 1/4, and the mean over steps divides it. Five standard deviations over 2,000 elements.
    folded_TN = (g * w8.scale_M1.t()).double()
    steps_T1 = folded_TN.abs().amax(dim=1, keepdim=True) / 127
    sigma_TK = 0.5 * steps_T1 * w8.q_MK.double().square().sum(dim=0).sqrt()
    if grad_weight == "column":
        x_TK = numerics.dequantize(numerics.quantize_columns(x)).double()
        steps_N1, operand_TK = g.double().abs().amax(dim=0)[:, None] / 127, x_TK
    else:
        x8 = numerics.quantize_rows(x)
        x_TK = numerics.dequantize(x8).double()
        steps_N1, operand_TK = (g * x8.scale_M1).double().abs().amax(dim=0)[:, None] / 127, x8.q_MK.double()
    sigma_NK = 0.5 * steps_N1 * operand_TK.square().sum(dim=0).sqrt()
    expected = (g.double() @ w_NK, g.double().t() @ x_TK)
    for total, truth, sigma in zip(sums, expected, (sigma_TK, sigma_NK), strict=True):
        assert ((total / num_steps - truth).abs() < 5 * sigma / num_steps**0.5).all()
        nearest_is_biased = (total / num_steps - truth).norm() / truth.norm()
        assert nearest_is_biased < 0.003  # rounding to nearest leaves 0.006 to 0.01, the same in every step


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_depend_on_seed_step_micro_batch_and_on_nothing_else(kind: str) -> None:
    x, g = _batch()

    def gradients(seed: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        model, plan = _layer(kind)
        low = linear.LowPrecision(model, plan, seed=seed, verify=False)
        with low.step(step, num_passes=1):
            low.micro_batch(micro_batch)
            return _gradients(model, x, g)

    first = gradients(1, 2, 3)
    for other, same in (((1, 2, 3), True), ((0, 2, 3), False), ((1, 1, 3), False), ((1, 2, 4), False)):
        for a, b in zip(first, gradients(*other), strict=True):
            assert torch.equal(a, b) == same, other


def test_a_micro_batch_is_rounded_as_its_part_of_the_global_batch() -> None:
    # By rows every scale is a row's own: two micro-batches of 8 tokens are one of 16.
    x, g = _batch()
    model, plan = _layer("int8_rowcol")
    rounding = linear.StochasticRounding(model, plan, seed=0)
    rounding.start(0, 0)
    whole, _ = _gradients(model, x, g)
    parts = []
    for i, part in enumerate((slice(0, T // 2), slice(T // 2, T))):
        rounding.start(0, i)
        parts.append(_gradients(model, x[part], g[part])[0])
    assert torch.equal(torch.cat(parts), whole)


def test_compiled_equals_eager_bitwise_and_a_step_is_no_new_graph() -> None:
    torch._dynamo.reset()  # other tests compiled the same forward
    x, g = _batch()
    results = []
    for compiled in (False, True):
        model, plan = _layer("int8_rowcol")
        rounding = linear.StochasticRounding(model, plan, seed=0)
        run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(3):
                rounding.start(step, 0)
                results.append(_gradients(run, x, g))
    for eager, compiled_ in zip(results[:3], results[3:], strict=True):
        for a, b in zip(eager, compiled_, strict=True):
            assert torch.equal(a, b)
