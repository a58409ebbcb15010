"""A linear layer whose weight is stored in INT8: what it computes, holds, saves, loads and refuses."""

import math

import pytest
import torch
from torch import Tensor, nn

from lptune import linear, numerics
from lptune.config import PrecisionConfig
from lptune.linear import Int8Weight
from tests.proofs.noise import predicted_relative_error, relative_error

INT8 = PrecisionConfig(kind="int8_weight_only", skip=())
T, K, N = 96, 128, 80


def _plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, dtype=dtype))


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = _plain(dtype)
    linear.convert(model, INT8)
    return model


def _weight(model: nn.Module, name: str = "0") -> Int8Weight:
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Int8Weight)
    return weight


def _run(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.backward(g)
    assert x.grad is not None
    gradients = {f"grad_{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "grad_input": x.grad, **gradients}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, K, generator=generator).to(dtype), torch.randn(T, N, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gemm_is_within_the_noise_of_the_stored_weight_and_not_without_it(dtype: torch.dtype) -> None:
    model, plain, (x, g) = _model(), _plain().double(), _inputs(dtype)
    ours, truth = _run(model, x, g), _run(plain, x.double(), g.double())
    noise = predicted_relative_error(plain[0].weight.detach(), 1)  # type: ignore[arg-type]
    # Roundings to the compute dtype: of the weight, of the bias and of the result.
    rounding = math.sqrt(3) * 2.0 ** (-9 if dtype == torch.bfloat16 else -22)
    for name in ("output", "grad_input"):
        error = relative_error(ours[name], truth[name])
        assert error <= 1.05 * math.hypot(noise, rounding), name
        assert error > noise / 2, name
    # Of compute dtype, and accumulated in the weight's own.
    assert relative_error(ours["grad_0.weight"], truth["grad_0.weight"]) <= rounding
    assert {name: type(value) for name, value in ours.items()} == dict.fromkeys(ours, Tensor)
    assert ours["grad_0.weight"].dtype == torch.float32


def test_compiled_equals_eager_and_one_graph_holds_it() -> None:
    model, (x, g) = _model(), _inputs(torch.bfloat16)
    eager = _run(model, x, g)
    compiled = _run(torch.compile(model, fullgraph=True, dynamic=False), x, g)  # type: ignore[arg-type]
    # The op is opaque; the bias' sum and addition are fused and may round once less.
    assert torch.equal(compiled["grad_input"], eager["grad_input"])
    assert relative_error(compiled["output"], eager["output"]) < 2.0**-8
    weight = "grad__orig_mod.0.weight"
    assert relative_error(compiled[weight], eager["grad_0.weight"]) < 2.0**-8
    assert type(compiled[weight]) is Tensor


def test_convert_keeps_the_parameter_object_and_unconvert_gives_plain_dequantized_weights() -> None:
    model = _plain()
    before, parameter = model[0].weight.detach().clone(), model[0].weight
    linear.convert(model, INT8)
    assert model[0].weight is parameter
    assert isinstance(parameter, Int8Weight)
    assert isinstance(parameter, nn.Parameter)
    stored = parameter.dequantize()
    scale = numerics.quantize_rows(before).scale_M1
    assert ((stored - before).abs() <= scale * (0.5 + 1e-5)).all()
    assert linear.unconvert(model) == 1
    assert model[0].weight is parameter
    assert type(model[0]) is nn.Linear
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, stored)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("gemm", ["output", "grad_input"])
def test_a_layer_that_multiplies_by_something_else_fails_the_verification(
    monkeypatch: pytest.MonkeyPatch, gemm: str
) -> None:
    kind = linear.KINDS["int8_weight_only"]
    original = kind.multiply  # type: ignore[attr-defined]

    def planted(a_TM: Tensor, w_NK: Int8Weight, transposed: bool, layer: Tensor, index: int) -> Tensor:
        if index != ("output", "grad_input").index(gemm):
            found: Tensor = original(a_TM, w_NK, transposed, layer, index)
            return found
        w = w_NK.dequantize(a_TM.dtype)
        return a_TM @ (w.t() if transposed else w)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, N))
    plan = linear.convert(model, INT8)
    monkeypatch.setattr(kind, "multiply", planted)
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match=f"layer 1: {gemm} was to run"),
        linear.verify_step(model, plan, num_passes=1),
    ):
        _run(model, *_inputs(torch.float32))


def test_a_state_dict_is_plain_and_brings_every_bit_back() -> None:
    model = _model()
    # 127 * s / 127 is not s for one scale in 128: of those, values alone would not bring anyone back.
    scales = torch.linspace(1, 2, 20_000)
    scales = scales[numerics.scale_from_amax(127 * scales, numerics.INT8).scale != scales]
    _weight(model).scale_N1.copy_(scales[:N, None])
    state = model.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(
        ("0.weight", "0.bias", "0.weight_scale"), Tensor
    )
    again = numerics.quantize_rows(state["0.weight"])
    assert (again.scale_M1 != _weight(model).scale_N1).all()
    for assign in (False, True):
        other = _model()
        other.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        assert torch.equal(_weight(other).q_NK, _weight(model).q_NK)
        assert torch.equal(_weight(other).scale_N1, _weight(model).scale_N1)
        assert other[0].weight.requires_grad


def test_state_dicts_go_to_and_come_from_plain_layers() -> None:
    model, plain = _model(), _plain()
    expected = _weight(model).q_NK.clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert (_weight(model).q_NK == 0).all()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(_weight(model).q_NK, expected)
    state = model.state_dict()
    del state["0.weight_scale"]
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, _weight(model).dequantize())  # type: ignore[arg-type]


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_on_meta_is_converted_and_then_loaded(assign: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N))
    linear.convert(model, INT8)
    assert _weight(model).is_meta
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(_plain().state_dict(), assign=assign)
    x, _ = _inputs(torch.float32)
    assert torch.equal(model(x), _model()(x))


def test_arithmetic_reads_the_dequantized_values() -> None:
    weight = _weight(_model()).detach()
    w = weight.dequantize()
    for ours, theirs in (
        (weight + 1, w + 1),
        (weight.t(), w.t()),
        (weight[:, :5], w[:, :5]),
        (weight.sum(), w.sum()),
    ):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)
    assert torch.equal(weight.view(-1), w.view(-1))
    assert torch.equal(torch.zeros_like(weight), torch.zeros(N, K))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizer_that_would_round_to_nearest_is_refused(options: dict[str, bool]) -> None:
    model = _model()
    optimizer = torch.optim.AdamW([model[0].weight], **options)
    model(torch.ones(T, K)).sum().backward()
    before = _weight(model).q_NK.clone()
    with pytest.raises(RuntimeError, match=r"train it with lptune\.training\.build_optimizer"):
        optimizer.step()
    assert torch.equal(_weight(model).q_NK, before)


def test_zero_rows_and_rows_that_are_not_finite() -> None:
    values = torch.randn(4, 16)
    values[1] = 0
    values[2, 3] = math.inf
    weight = Int8Weight.from_float(values)
    assert (weight.dequantize()[1] == 0).all()
    assert weight.dequantize()[2].isnan().all()
    again = Int8Weight.from_float(weight.dequantize(), weight.scale_N1)
    finite = [0, 1, 3]
    assert torch.equal(again.q_NK[finite], weight.q_NK[finite])
    assert again.dequantize()[2].isnan().all()


def test_scales_bring_back_every_value_of_every_scale() -> None:
    # All 255 values under scales of all sizes: the smallest normal float32, the largest, and random ones.
    generator = torch.Generator().manual_seed(0)
    scale = torch.cat([torch.tensor([2.0**-126, 2.0**120]), torch.rand(4000, generator=generator)])[:, None]
    q = torch.arange(-127, 128, dtype=torch.int8).expand(scale.shape[0], 255)
    restored = Int8Weight.from_float(q.float() * scale, scale)
    assert torch.equal(restored.q_NK, q)
    assert torch.equal(restored.scale_N1, scale)
