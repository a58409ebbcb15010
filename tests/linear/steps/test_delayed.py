"""Delayed scaling: which amaxes decide a scale, and that the history survives what it has to."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from lptune import linear, numerics
from lptune.config import PrecisionConfig
from lptune.kernels import LIVE
from lptune.linear.steps.delayed import HISTORY
from tests.proofs import noise

CPU = torch.device("cpu")
DELAYED = PrecisionConfig(kind="float8_delayed", emulate=True)
TENSORWISE = PrecisionConfig(kind="float8_tensorwise", emulate=True)
T, K, N = 32, 48, 16


def _model(precision: PrecisionConfig) -> tuple[nn.Sequential, linear.Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    return model, linear.convert(model, precision)


def _gradients(model: nn.Sequential, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.backward(g)
    weight = model[0].weight
    assert x.grad is not None
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad


def _batch(scale: float = 1.0, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(T, K, generator=generator), scale * torch.randn(T, N, generator=generator)


def test_with_an_empty_history_it_is_tensorwise_scaling_bitwise() -> None:
    (delayed, plan), (tensorwise, _) = _model(DELAYED), _model(TENSORWISE)
    x, g = _batch()
    scaling = linear.DelayedScaling(plan, CPU)
    with scaling.step():
        actual = _gradients(delayed, x, g)
    for ours, expected in zip(actual, _gradients(tensorwise, x, g), strict=True):
        assert torch.equal(ours, expected)


def test_a_scale_comes_from_the_largest_amax_of_past_steps_and_what_exceeds_it_saturates() -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    x, g = _batch()
    with scaling.step():
        _gradients(model, x, g)
    with scaling.step():
        output = _gradients(model, 10 * x, g)[0]
    past = x.abs().amax()
    scale, inverse = numerics.scale_from_amax(past, numerics.E4M3)
    saturated = numerics.round_to(10 * x * inverse, numerics.E4M3).float() * scale
    assert saturated.abs().amax() == pytest.approx(float(past), rel=1e-6)
    w = numerics.dequantize(numerics.quantize_tensor(model[0].weight.detach(), numerics.E4M3))
    # float32 sums of K products.
    assert noise.relative_error(output, saturated @ w.t()) < K * 2.0**-24
    with scaling.step():  # the third step knows the second's amax
        output = _gradients(model, 10 * x, g)[0]
    assert noise.relative_error(output, 10 * x @ w.t()) < 0.05


def test_tensors_with_values_beyond_their_scale_are_counted() -> None:
    """By more than half a step of the largest number: 448 + 16 in e4m3, 57,344 + 4,096 in e5m2."""
    model, plan = _model(DELAYED)
    low = linear.LowPrecision(model, plan, verify=False)
    x, g = _batch()

    def after(x_times: float, g_times: float) -> int:
        with low.step(0, num_passes=1):
            _gradients(model, x_times * x, g_times * g)
        return low.metrics()["num_saturated"]

    assert after(1.0, 1.0) == 0  # without a history, each tensor has its own scale
    assert after(1.03, 1.06) == 0
    assert after(1.03 * 1.04, 1.06 * 1.06) == 1  # x
    assert after(1.0, 1.06 * 1.06 * 1.08) == 1  # g
    assert after(100.0, 100.0) == 2
    with torch.no_grad():
        model[0].weight.mul_(100.0)
    assert after(100.0, 100.0) == 1
    assert after(1.0, math.inf) == 0  # skipped, and counted there
    other = linear.LowPrecision(*_model(TENSORWISE), verify=False)
    with other.step(0, num_passes=1):
        pass
    assert other.metrics() == {}


def test_the_maximum_is_taken_over_the_micro_batches_of_a_step_and_over_ranks() -> None:
    model, plan = _model(DELAYED)
    other_rank = torch.tensor([[0.5, 1e3, 0.5]])
    calls = 0

    def all_reduce_max(amaxes: Tensor) -> None:
        nonlocal calls
        calls += 1
        amaxes.copy_(torch.maximum(amaxes, other_rank))

    scaling = linear.DelayedScaling(plan, CPU, all_reduce_max)
    batches = [_batch(scale, seed) for seed, scale in enumerate((1.0, 3.0, 2.0))]
    with scaling.step():
        for x, g in batches:
            _gradients(model, x, g)
    (history,) = scaling.state().values()
    assert calls == 1
    assert float(history[-1, 0]) == max(float(x.abs().amax()) for x, _ in batches)
    assert float(history[-1, 1]) == 1e3
    assert float(history[-1, 2]) == max(float(g.abs().amax()) for _, g in batches)


def test_a_run_goes_on_with_another_number_of_data_ranks_by_the_same_scales() -> None:
    """FSDP averages, so with four data ranks a loop multiplies its loss, and each gradient, by four."""
    model, plan = _model(DELAYED)
    x, g = _batch()
    alone = linear.DelayedScaling(plan, CPU)
    with alone.step():
        _gradients(model, x, g)
    with alone.step():
        _, *expected = _gradients(model, x, g)
    of_four = linear.DelayedScaling(plan, CPU, gradient_factor=4)
    for name, history in of_four.state().items():
        history.copy_(alone.state()[name])
    with of_four.step():
        _, *actual = _gradients(model, x, 4 * g)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, 4 * theirs)
    ours, theirs = (next(iter(scaling.state().values())) for scaling in (of_four, alone))
    assert torch.equal(ours[-1, 2], theirs[-1, 2])


def test_without_a_reduction_of_its_own_it_takes_the_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that went by different histories would quantize one weight by different scales."""
    reduced: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda amaxes, op: reduced.append(amaxes))
    model, plan = _model(DELAYED)
    with linear.DelayedScaling(plan, CPU).step():
        _gradients(model, *_batch())
    (amaxes,) = reduced
    assert (amaxes > 0).all()


def test_an_evaluation_between_steps_leaves_no_trace() -> None:
    histories = []
    for evaluates in (False, True):
        model, plan = _model(DELAYED)
        scaling = linear.DelayedScaling(plan, CPU)
        for seed in range(3):
            with scaling.step():
                _gradients(model, *_batch(seed=seed))
            if evaluates:
                with torch.no_grad():
                    model(1e4 * _batch()[0])
        histories.append(*scaling.state().values())
    assert torch.equal(*histories)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_comes_out_as_nan_and_is_not_remembered(bad: float) -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    x, g = _batch()
    with scaling.step():
        _gradients(model, x, g)
    before = next(iter(scaling.state().values())).amax(dim=0)
    broken = x.clone()
    broken[3, 4] = bad
    with scaling.step():
        assert _gradients(model, broken, g)[0].isnan().all()
    with scaling.step():
        after = _gradients(model, x, g)
    assert all(result.isfinite().all() for result in after)
    assert torch.equal(next(iter(scaling.state().values())).amax(dim=0), before)


@pytest.mark.parametrize("skipped", [True, False])
def test_a_step_that_is_undone_leaves_nothing_of_what_was_huge_and_finite_in_it(skipped: bool) -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    x, g = _batch()
    with scaling.step():
        _gradients(model, x, g)
    (history,) = (tensor.clone() for tensor in scaling.state().values())
    expected = model(x)
    with scaling.step():
        _gradients(model, 1e30 * x, g)
    scaling.undo(torch.tensor(skipped))
    assert torch.equal(next(iter(scaling.state().values())), history) == skipped
    # An evaluation that follows goes by it at once.
    assert torch.equal(model(x), expected) == skipped


def test_a_run_that_goes_on_from_saved_histories_has_the_same_bits() -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    for seed in range(3):
        with scaling.step():
            _gradients(model, *_batch(scale=3.0, seed=seed))
    saved = {name: tensor.clone() for name, tensor in scaling.state().items()}
    evaluated = model(_batch()[0])
    with scaling.step():
        expected = _gradients(model, *_batch())
    again, plan = _model(DELAYED)
    resumed = linear.DelayedScaling(plan, CPU)
    for name, tensor in resumed.state().items():
        tensor.copy_(saved[name])
    resumed.loaded()
    assert torch.equal(again(_batch()[0]), evaluated)  # before the first step, too
    with resumed.step():
        actual = _gradients(again, *_batch())
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    # And the history mattered: without it the bits are others.
    fresh, plan = _model(DELAYED)
    with linear.DelayedScaling(plan, CPU).step():
        assert not torch.equal(_gradients(fresh, *_batch())[2], expected[2])


def test_a_copy_has_no_part_in_the_histories_of_the_original() -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    copied = copy.deepcopy(model)
    with scaling.step():
        with pytest.raises(RuntimeError, match="a copy of a converted model has none"):
            copied(_batch()[0])
        assert linear.unconvert(copied) == 1
        _gradients(model, *_batch())


def test_a_model_that_is_gone_leaves_no_histories_behind() -> None:
    model, plan = _model(DELAYED)
    scaling = weakref.ref(linear.DelayedScaling(plan, CPU))
    (layer,) = plan.converted
    assert layer.number is not None
    state = LIVE[layer.number]
    assert state.amaxes is not None
    assert state.amax_source is scaling()
    del model, state
    gc.collect()
    assert LIVE.get(layer.number) is None
    assert scaling() is None


def test_an_outlier_is_forgotten_after_its_history() -> None:
    model, plan = _model(DELAYED)
    scaling = linear.DelayedScaling(plan, CPU)
    x, g = _batch()
    with scaling.step():
        _gradients(model, 1000 * x, g)
    errors = []
    for _ in range(HISTORY + 1):
        with scaling.step():
            output = _gradients(model, x / 1000, g)[0]
        errors.append(noise.relative_error(output, x.double() / 1000 @ model[0].weight.double().t()))
    # A millionth of the scale's amax is below half of e4m3's smallest number: nothing is left of x.
    assert min(errors[:HISTORY]) == 1.0
    assert errors[HISTORY] < 0.05
