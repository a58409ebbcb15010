"""A shadow pass: the errors that it finds are right, and it leaves everything as it was."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.kernels import record_gemms
from lptune.linear.kinds import rowwise
from lptune.linear.steps.shadow import NOT_FINITE_DB, LayerErrors, ShadowPass

KINDS = [name for name, keys in PRECISION_KINDS.items() if name != "none" and not keys.stores_low]
T, WIDTHS = 48, (64, 96, 32)


class Model(nn.Module):
    """Two linear layers with a bias and a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(*WIDTHS[:2])
        self.second = nn.Linear(*WIDTHS[1:], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(T, 64) -> (T, 32)."""
        return self.second(F.silu(self.first(x)))


def precision(kind: str, **keys: object) -> PrecisionConfig:
    return PrecisionConfig(kind=kind, emulate=not kind.startswith("int8"), skip=(), **keys)  # type: ignore[arg-type]


def made(chosen: PrecisionConfig) -> tuple[Model, linear.Plan, linear.LowPrecision]:
    torch.manual_seed(0)
    model = Model()
    plan = linear.convert(model, chosen)
    return model, plan, linear.LowPrecision(model, plan, seed=3, verify=False)


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, WIDTHS[0], generator=generator)


def loss_of(model: Model, x: Tensor) -> Tensor:
    return model(x).square().sum() / T


def errors(model: Model, low: linear.LowPrecision, x: Tensor, step: int = 1) -> dict[str, LayerErrors]:
    shadow = ShadowPass(model, low.plan)
    with low.outside_of_steps(step, 0), shadow.comparing():
        shadow.backward(loss_of(model, x))
    return shadow.by_layer()


def sqnr_db(low: Tensor, high: Tensor) -> float:
    high64 = high.double()
    return 10 * math.log10(float(high64.square().sum() / (low.double() - high64).square().sum()))


def train_step(model: Model, low: linear.LowPrecision, step: int) -> dict[str, Tensor]:
    """The gradients of a step, and its loss."""
    with low.step(step, num_passes=1):
        low.micro_batch(0)
        loss = loss_of(model, batch(step))
        loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    return found | {"loss": loss.detach()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_errors_are_those_of_the_three_gemms(kind: str) -> None:
    model, _, low = made(precision(kind))
    x = batch(1)
    train_step(model, low, 0)  # float8_delayed has a history then
    found = errors(model, low, x)["second"]

    # The same x and g reach a layer of plain torch. What the layer itself computes is compared with that.
    layer, seen = model.second, dict[str, Tensor]()
    x_TK = F.silu(model.first(x)).detach().requires_grad_()
    with low.step(1, num_passes=1):
        low.micro_batch(0)
        out = layer(x_TK)
        out.register_hook(lambda g: seen.update(g=g))
        (out.square().sum() / T).backward()
    assert x_TK.grad is not None
    assert layer.weight.grad is not None
    w_NK, g_TN = layer.weight.detach(), seen["g"]
    exact_weight = g_TN.double().t() @ x_TK.detach().double()
    expected = (
        sqnr_db(out.detach(), x_TK.detach().double() @ w_NK.double().t()),
        sqnr_db(x_TK.grad, g_TN.double() @ w_NK.double()),
        sqnr_db(layer.weight.grad, exact_weight),
        float(F.cosine_similarity(layer.weight.grad.double().flatten(), exact_weight.flatten(), dim=0)),
    )
    # Float32 rounds the exact products to about 2^-24, 144 dB; against 60 dB at most that is 1e-4 of the
    # noise. float8_rowwise_with_gw_hp has a grad_weight in float32, with no error but that rounding.
    for ours, theirs in zip(found[:4], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3) or (ours == math.inf and theirs > 100)
    # Three values leave normal numbers an error of 0.51, 5.8 dB.
    assert min(found[:3]) > (5 if kind == "bitnet" else 15)


@pytest.mark.parametrize(
    ("kind", "stochastic"),
    [
        *((kind, False) for kind in KINDS),
        *((kind, True) for kind in KINDS if PRECISION_KINDS[kind].can_round_stochastically),
    ],
)
def test_a_pass_changes_no_bit_of_the_training(kind: str, stochastic: bool) -> None:
    chosen = precision(kind, stochastic_rounding=stochastic)
    (model, _, low), (other, _, other_low) = made(chosen), made(chosen)
    for step in range(3):
        state = copy.deepcopy(low.state())
        attributes = [dict(vars(layer)) for layer in (model.first, model.second)]
        torch.manual_seed(step)
        before = torch.random.get_rng_state()
        with record_gemms() as executed:
            found = errors(model, low, 100 * batch(7), step)
        assert all(each.worst_sqnr_db < 100 for each in found.values())  # it ran
        assert not executed
        assert torch.equal(torch.random.get_rng_state(), before)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [dict(vars(layer)) for layer in (model.first, model.second)] == attributes
        assert all(torch.equal(tensor, state[name]) for name, tensor in low.state().items())
        with_pass, without = train_step(model, low, step), train_step(other, other_low, step)
        assert all(torch.equal(tensor, without[name]) for name, tensor in with_pass.items())
    assert all(torch.equal(tensor, other_low.state()[name]) for name, tensor in low.state().items())


@pytest.mark.parametrize("how", ["comparing", "high"])
def test_an_error_in_a_pass_leaves_the_layers_as_they_were(how: str) -> None:
    model, plan, _ = made(precision("int8_rowcol"))
    attributes = dict(vars(model.first))
    with pytest.raises(ZeroDivisionError), getattr(ShadowPass(model, plan), how)():
        raise ZeroDivisionError
    assert dict(vars(model.first)) == attributes


@pytest.mark.parametrize("kind", KINDS)
def test_high_is_the_model_in_plain_torch(kind: str) -> None:
    model, plan, _ = made(precision(kind))
    plain = Model()
    plain.load_state_dict(model.state_dict())
    with ShadowPass(model, plan).high(), torch.no_grad():
        out = model(batch(1))
    torch.testing.assert_close(out, plain(batch(1)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_fell_back_has_no_error_and_runs_no_low_gemm(kind: str) -> None:
    model, _, low = made(precision(kind, all_gather="high"))
    train_step(model, low, 0)
    low.switch_to_high(["first"])
    found = errors(model, low, batch(2))
    assert found["first"].worst_sqnr_db == math.inf
    assert found["first"].grad_weight_cosine == pytest.approx(1.0, abs=1e-12)
    assert found["second"].worst_sqnr_db < 60
    with record_gemms() as executed:
        train_step(model, low, 1)
    numbers = {layer.name: layer.number for layer in low.plan.layers}
    assert {number for number, _ in executed} == {numbers["second"]}


def test_a_weight_gathered_in_8_bits_cannot_fall_back() -> None:
    _, _, low = made(precision("int8_rowcol"))
    with pytest.raises(ValueError, match="first: its weight is gathered in 8 bits"):
        low.switch_to_high(["first"])


def test_saturated_and_underflowed_elements_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16, bias=False))
    low = linear.LowPrecision(model, linear.convert(model, precision("int8_rowcol")), verify=False)
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(2, 120, (16, 64)).float()).clamp_(max=127)[:, 0] = 127
    x_TK = torch.zeros(32, 64)  # by rows: one at the maximum, two that round to 0, 13 zeros
    x_TK[:, :13] = 10.0
    x_TK[:, 0], x_TK[:, 13:15] = 127.0, 0.4
    shadow = ShadowPass(model, low.plan)
    with shadow.comparing():
        out_TN = model(x_TK)
        # By rows and by columns, all elements of g are equal, so they are all at the maximum.
        shadow.backward(out_TN.sum())
    found = shadow.by_layer()["0"]
    assert found.saturated == 1.0
    assert found.underflowed == pytest.approx(2 / 15)  # by columns, x has no element that is rounded to 0


def test_numbers_that_are_not_finite() -> None:
    model, _, low = made(precision("int8_rowcol"))
    x = batch(1)
    x[0, 0] = math.inf  # high precision is not finite either: nothing to compare
    assert errors(model, low, x)["first"].output_sqnr_db == math.inf
    with torch.no_grad():
        model.second.weight.zero_()  # no signal: g is 0
    found = errors(model, low, batch(1))
    assert found["second"].worst_sqnr_db == math.inf
    assert found["first"].grad_weight_cosine == 1.0


def test_a_nan_that_only_low_precision_makes_is_the_worst_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, low = made(precision("int8_rowcol"))
    real = rowwise.scaled_mm

    def faulty(*args: Any, **kwargs: Any) -> Tensor:
        return real(*args, **kwargs).index_fill(0, torch.tensor([3]), math.nan)

    monkeypatch.setattr(rowwise, "scaled_mm", faulty)
    found = errors(model, low, batch(1))
    assert found["first"].output_sqnr_db == NOT_FINITE_DB == found["first"].worst_sqnr_db
    assert found["second"].worst_sqnr_db == math.inf  # its x is not finite, in high precision either


def test_gradients_that_are_there_stay() -> None:
    model, _, low = made(precision("int8_rowcol"))
    loss_of(model, batch(1)).backward()
    kept = {name: (parameter.grad, parameter.grad.clone()) for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    errors(model, low, batch(2))
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name][0]
        assert torch.equal(parameter.grad, kept[name][1])  # type: ignore[arg-type]


def test_a_frozen_layer_has_no_gradient_to_compare() -> None:
    model, _, low = made(precision("int8_rowcol"))
    model.first.weight.requires_grad_(False)
    found = errors(model, low, batch(1))
    assert found["first"].grad_weight_sqnr_db == math.inf
    assert found["first"].output_sqnr_db < 60
    assert found["second"].grad_weight_sqnr_db < 60


@pytest.mark.parametrize("factor", [1e-25, 1.0, 1e25])
def test_an_error_does_not_depend_on_the_size_of_the_numbers(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    low = linear.LowPrecision(model, linear.convert(model, precision("int8_rowcol")), verify=False)
    x_TK, g_TN = torch.randn(T, 64), torch.randn(T, 32)
    found = list[LayerErrors]()
    for size in (1.0, factor):
        shadow = ShadowPass(model, low.plan)
        with shadow.comparing():
            shadow.backward((model(x_TK) * (g_TN * size)).sum())
        found.append(shadow.by_layer()["0"])
    # Both sizes are no powers of two, so rounding to float32 (2^-24 each) may flip a rounding to 8 bits.
    assert found[1][:3] == pytest.approx(found[0][:3], abs=0.01)
    assert 30 < found[0].worst_sqnr_db < 50
