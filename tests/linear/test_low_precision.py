"""One object holds what a kind keeps alive: nothing of it can be left out unnoticed."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lptune import linear
from lptune.config import PrecisionConfig

KINDS = ("int8_rowcol", "int8_tensorwise", "float8_delayed", "float8_rowwise", "float8_blockwise", "mxfp8")


def _model(precision: PrecisionConfig) -> tuple[nn.Module, linear.Plan, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    plan = linear.convert(model, precision)
    return model, plan, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number))
    return (model(x) - x).square().mean()


def _gradient(model: nn.Module) -> torch.Tensor:
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_in_the_same_loop_and_is_verified(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = PrecisionConfig(kind=kind, emulate=not kind.startswith("int8"))
    model, plan, optimizer = _model(precision)
    low = linear.LowPrecision(model, plan, optimizer)
    losses = []
    for step in range(20):
        with low.step(step, num_passes=2):
            for number in range(2):
                low.micro_batch(number)
                loss = _loss(model, number)
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    # In each of two passes three GEMMs of two layers, but no grad_input of the first one.
    assert capsys.readouterr().out.count("verified: 10 ") == 1
    assert low.verified.num_gemms == 10
    assert set(low.state()) == ({"amax_history/0", "amax_history/2"} if kind == "float8_delayed" else set())


@pytest.mark.parametrize("verify", [True, False])
def test_the_first_step_is_compared_with_the_plan_unless_told_otherwise(verify: bool) -> None:
    model, plan, optimizer = _model(PrecisionConfig(kind="int8_rowcol"))
    low = linear.LowPrecision(model, plan, optimizer, verify=verify)
    fault = pytest.raises(linear.PrecisionNotAppliedError, match="is num_passes right")
    with fault if verify else nullcontext(), low.step(0, num_passes=2):
        _loss(model, 0).backward()


def test_a_loop_that_leaves_a_piece_out_is_an_error_and_not_another_kind() -> None:
    model, plan, optimizer = _model(PrecisionConfig(kind="int8_rowcol", stochastic_rounding=True))
    low = linear.LowPrecision(model, plan, optimizer)
    no_key = pytest.raises(RuntimeError, match=r"call low\.micro_batch\(number\) of linear\.LowPrecision")
    with no_key, low.step(0, num_passes=1):
        _loss(model, 0).backward()
    with low.step(1, num_passes=1):
        low.micro_batch(0)
        _loss(model, 0).backward()
    for context in (nullcontext(), low.step(2, num_passes=1)):  # the key of an earlier step is none of theirs
        with pytest.raises(RuntimeError, match=r"call low\.micro_batch"), context:
            _loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"belongs inside `with low\.step"):
        low.micro_batch(0)
    model, plan, optimizer = _model(PrecisionConfig(kind="float8_delayed", emulate=True))
    with pytest.raises(RuntimeError, match=r"make low = linear\.LowPrecision"):
        _loss(model, 0)
    low = linear.LowPrecision(model, plan, optimizer, verify=False)
    with pytest.raises(RuntimeError, match=r"within `with low\.step"):
        _loss(model, 0).backward()
