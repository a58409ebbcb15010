"""The three GEMMs of a low-precision linear layer against float64, in every mode, eager and compiled."""

import itertools
import math

import pytest
import torch
from torch import nn

from lptune import linear, numerics
from lptune.config import PrecisionConfig

GRAD_INPUT = ("folded", "column", "requantized", "high")
GRAD_WEIGHT = ("column", "folded", "high")
MODES = list(itertools.product(GRAD_INPUT, GRAD_WEIGHT))
T, K, N = 96, 128, 80


def _layer(dtype: torch.dtype, **keys: str) -> linear.LowPrecisionLinear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    linear.convert(model, PrecisionConfig(kind="int8_rowcol", **keys))  # type: ignore[arg-type]
    layer = model[0]
    assert isinstance(layer, linear.LowPrecisionLinear)
    return layer


def _run(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(g)
    assert x.grad is not None
    return {
        "output": out.detach(),
        "grad_input": x.grad,
        "grad_weight": layer.weight.grad,
        "grad_bias": layer.bias.grad,
    }  # type: ignore[dict-item]


def _truth(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = nn.Linear(K, N, dtype=torch.float64)
    plain.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    return _run(plain, x.double(), g.double())


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, K, generator=generator).to(dtype), torch.randn(T, N, generator=generator).to(dtype)


def _bounds(layer: nn.Module, x: torch.Tensor, g: torch.Tensor, keys: dict[str, str]) -> dict[str, float]:
    """Relative noise of each GEMM: the quantization noise of its operands, added as variances."""
    noise, w = numerics.predicted_relative_error, layer.weight.detach()
    w_rows = numerics.quantize_rows(w)
    gs = g.float() * w_rows.scale_M1.t()
    deq = numerics.dequantize(w_rows)
    grad_input = {
        "folded": (noise(gs, 1), noise(w, 1)),
        "column": (noise(g, 1), noise(w, 0)),
        "requantized": (noise(g, 1), noise(w, 1), noise(deq, 0)),
        "high": (noise(w, 1),),
    }[keys["grad_input"]]
    x_scale = numerics.quantize_rows(x).scale_M1
    grad_weight = {
        "column": (noise(g, 0), noise(x, 0)),
        "folded": (noise(g.float() * x_scale, 0), noise(x, 1)),
        "high": (),
    }[keys["grad_weight"]]
    rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-22  # of the result, and of operands kept high
    # The sums are random: 5 % for the spread of a norm over T * N or more products.
    bound = {
        name: 1.05 * math.sqrt(sum(part**2 for part in parts)) + rounding
        for name, parts in (
            ("output", (noise(x, 1), noise(w, 1))),
            ("grad_input", grad_input),
            ("grad_weight", grad_weight),
        )
    }
    return bound | {"grad_bias": 2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-20}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grad_input", "grad_weight"), MODES)
def test_every_gemm_is_within_the_formats_noise_and_not_without_it(
    dtype: torch.dtype, grad_input: str, grad_weight: str
) -> None:
    keys = {"grad_input": grad_input, "grad_weight": grad_weight}
    layer, (x, g) = _layer(dtype, **keys), _inputs(dtype)
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    bounds = _bounds(layer, x, g, keys)
    for name, bound in bounds.items():
        assert numerics.relative_error(ours[name], truth[name]) <= bound, name
    # A signal to noise of the compute dtype would say that the 8-bit path did not run.
    if dtype == torch.float32:
        assert numerics.relative_error(ours["output"], truth["output"]) > bounds["output"] / 2
        for name in ("grad_input", "grad_weight"):
            if keys[name] != "high":
                assert numerics.relative_error(ours[name], truth[name]) > bounds[name] / 2, name


def test_folding_rounds_the_weight_once() -> None:
    # With g exactly representable after folding, what is left is the weight's own quantization: the one of
    # forward.
    layer, (x, _) = _layer(torch.float32), _inputs(torch.float32)
    g = torch.zeros(T, N)
    g[:, 7] = 1.0  # one row of W: g * scale has one nonzero per row, which quantizes exactly
    ours = _run(layer, x, g)["grad_input"]
    w = numerics.dequantize(numerics.quantize_rows(layer.weight.detach()))
    assert torch.allclose(ours, w[7].expand(T, K), rtol=4 * 2.0**-24, atol=0)


def test_high_gemms_are_the_compute_dtypes_own_bitwise() -> None:
    layer, (x, g) = _layer(torch.bfloat16, output="high", grad_weight="high"), _inputs(torch.bfloat16)
    plain = nn.Linear(K, N, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    ours, theirs = _run(layer, x, g), _run(plain, x, g)
    assert torch.equal(ours["grad_weight"], theirs["grad_weight"])
    # nn.Linear adds the bias inside the GEMM, before rounding.
    assert torch.equal(ours["output"], x @ plain.weight.t() + plain.bias)


@pytest.mark.parametrize(
    ("grad_input", "grad_weight"),
    [("folded", "column"), ("column", "folded"), ("requantized", "high"), ("high", "column")],
)
def test_compiled_equals_eager_bitwise(grad_input: str, grad_weight: str) -> None:
    layer, (x, g) = (
        _layer(torch.float32, grad_input=grad_input, grad_weight=grad_weight),
        _inputs(torch.float32),
    )
    eager = _run(layer, x, g)
    compiled = _run(torch.compile(layer, fullgraph=True, dynamic=False), x, g)  # type: ignore[arg-type]
    for name, value in eager.items():
        if name == "grad_bias" or "high" in (grad_input, grad_weight):
            # A float32 sum in another order: of T values, or a float32 GEMM.
            assert numerics.relative_error(compiled[name], value) < 2.0**-20, name
        else:
            assert torch.equal(value, compiled[name]), name


def test_float32_weight_under_bfloat16_compute_is_rounded_before_quantization_compiled_too() -> None:
    # Inductor would drop the float32 -> bfloat16 -> float32 round trip and change every scale.
    layer, (x, g) = _layer(torch.float32), _inputs(torch.bfloat16)
    rounded = _layer(torch.float32)
    with torch.no_grad():
        rounded.weight.copy_(layer.weight.bfloat16().float())
        for each in (
            layer,
            rounded,
        ):  # the bias takes part in no quantization, and Inductor drops its rounding
            each.bias.zero_()
    eager = _run(layer, x, g)
    assert torch.equal(eager["output"], _run(rounded, x, g)["output"])
    compiled = _run(torch.compile(layer, fullgraph=True, dynamic=False), x, g)  # type: ignore[arg-type]
    assert torch.equal(compiled["output"], eager["output"])
    assert torch.equal(compiled["grad_input"], eager["grad_input"])


def test_padding_rows_have_gradients_of_exactly_zero() -> None:
    layer, (x, g) = _layer(torch.bfloat16), _inputs(torch.bfloat16)
    g[-10:] = 0
    assert (_run(layer, x, g)["grad_input"][-10:] == 0).all()


@pytest.mark.parametrize("grad_weight", ["column", "folded"])
def test_zero_rows_of_weight_and_input_take_nothing_from_the_others(grad_weight: str) -> None:
    # A stand-in scale of 1 for a zero row would be folded into g and dwarf all other columns.
    keys = {"grad_input": "folded", "grad_weight": grad_weight}
    layer, (x, g) = _layer(torch.float32, **keys), _inputs(torch.float32)
    with torch.no_grad():
        layer.weight[5] = 0
    x[7] = 0
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    for name, bound in _bounds(layer, x, g, keys).items():
        assert numerics.relative_error(ours[name], truth[name]) <= bound, name


def test_an_outlier_token_and_an_odd_number_of_tokens_stay_within_the_bound() -> None:
    keys = {"grad_input": "folded", "grad_weight": "column"}
    layer, (x, g) = _layer(torch.bfloat16, **keys), _inputs(torch.bfloat16)
    x, g = x[:37].clone(), g[:37].clone()
    x[3] *= 1000
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    for name, bound in _bounds(layer, x, g, keys).items():
        assert numerics.relative_error(ours[name], truth[name]) <= bound, name


def test_no_tokens_give_no_output_and_zero_gradients() -> None:
    layer = _layer(torch.float32)
    results = _run(layer, torch.zeros(0, K), torch.zeros(0, N))
    assert results["output"].shape == (0, N)
    assert results["grad_input"].shape == (0, K)
    assert (results["grad_weight"] == 0).all()


def test_batched_input_equals_flattened() -> None:
    layer, (x, _) = _layer(torch.bfloat16), _inputs(torch.bfloat16)
    assert torch.equal(layer(x.view(4, T // 4, K)), layer(x).view(4, T // 4, N))


def test_folded_grad_weight_saves_the_input_in_8_bits() -> None:
    saved: list[torch.Tensor] = []
    layer, (x, _) = _layer(torch.bfloat16, grad_weight="folded"), _inputs(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x.requires_grad_())
    assert [t.dtype for t in saved if t.shape == (T, K)] == [torch.int8]
