"""A fall-back to compute dtype cannot go unnoticed: it is planted in one GEMM of one layer, and named."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.kernels import GEMMS

INT8 = PrecisionConfig(kind="int8_rowcol")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 16))


def _step(model: nn.Module, num_passes: int = 2) -> None:
    for _ in range(num_passes):
        model(torch.randn(24, 32, requires_grad=True)).square().sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_ran_as_planned_is_counted(compiled: bool) -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 2) as verified:
        _step(torch.compile(model, fullgraph=True) if compiled else model)
    assert verified.num_gemms == 3 * 3 * 2
    assert verified.low_precision_flops_fraction == 1.0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_planted_fall_back_in_one_gemm_is_named(gemm: str, compiled: bool) -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    model[2].spec = model[2].spec._replace(**{gemm: "high"})  # type: ignore[arg-type, type-var]
    with (
        pytest.raises(
            linear.PrecisionNotAppliedError, match=f"layer 2: {gemm} was to run .* ran 0 times"
        ) as raised,
        linear.verify_step(model, plan, 2),
    ):
        _step(torch.compile(model, fullgraph=True) if compiled else model)
    assert "layer 0" not in str(raised.value)
    assert "layer 4" not in str(raised.value)


def test_a_layer_that_became_plain_is_named() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    low = model[4]
    low.forward = lambda x: nn.functional.linear(x, low.weight, low.bias)
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match="layer 4: output"),
        linear.verify_step(model, plan, 2),
    ):
        _step(model)


def test_a_fall_back_in_one_of_two_passes_is_named() -> None:
    model = _model()
    plan = linear.convert(model, INT8)

    def two_passes() -> None:
        _step(model, 1)
        linear.unconvert(model)
        _step(model, 1)

    with (
        pytest.raises(linear.PrecisionNotAppliedError, match="layer 0: output"),
        linear.verify_step(model, plan, 2),
    ):
        two_passes()


def test_low_precision_where_high_was_planned_is_named() -> None:
    model = _model()
    plan = linear.convert(model, dataclasses.replace(INT8, grad_weight="high"))
    model[0].spec = model[0].spec._replace(grad_weight="column")  # type: ignore[type-var]
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match="layer 0: grad_weight was to run 0 times"),
        linear.verify_step(model, plan, 2),
    ):
        _step(model)


def test_recomputation_counts_output_twice_and_is_right() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 1) as verified:
        checkpoint(model, torch.randn(8, 32, requires_grad=True), use_reentrant=False).sum().backward()
    assert verified.num_gemms == 3 * 4


def test_a_head_registered_before_the_body_is_understood() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(32, 16), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    model = HeadFirst()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 1):
        model(torch.randn(4, 32)).sum().backward()
    model.head.spec = model.head.spec._replace(grad_input="high")  # type: ignore[type-var]
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match="layer head: grad_input"),
        linear.verify_step(model, plan, 1),
    ):
        model(torch.randn(4, 32)).sum().backward()


def test_another_model_does_not_hide_a_fall_back() -> None:
    policy, reference = _model(), _model()
    plan = linear.convert(policy, INT8)
    linear.convert(reference, INT8)
    policy[0].spec = policy[0].spec._replace(output="high")  # type: ignore[type-var]

    def both() -> None:
        reference(torch.randn(24, 32))
        _step(policy, 1)

    with (
        pytest.raises(linear.PrecisionNotAppliedError, match="layer 0: output"),
        linear.verify_step(policy, plan, 1),
    ):
        both()


def test_verifications_can_be_nested() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 1) as outer, linear.verify_step(model, plan, 1) as inner:
        _step(model, 1)
    assert outer == inner


def test_frozen_layers_need_no_grad_weight() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    model[2].weight.requires_grad_(False)
    with linear.verify_step(model, plan, 2) as verified:
        _step(model)
    assert verified.num_gemms == (3 * 3 - 1) * 2
    assert verified.low_precision_flops_fraction == 1.0  # of the FLOPs that the step has


def test_the_fraction_counts_what_stayed_high() -> None:
    model = _model()
    plan = linear.convert(model, dataclasses.replace(INT8, grad_weight="high"), skip=["4"])
    with linear.verify_step(model, plan, 2) as verified:
        _step(model)
    # The first layer's grad_input is no need of training: nothing trained stands before it.
    low, all_ = 32 * 48 + 2 * 48 * 32, 2 * 32 * 48 + 3 * (48 * 32 + 32 * 16)
    assert verified.low_precision_flops_fraction == pytest.approx(low / all_)
