"""The three GEMMs of a low-precision linear layer against float64, in every mode, eager and compiled."""

import contextlib
import itertools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.hardware.planned import planned_for
from lptune.kernels import GEMMS, KEY
from lptune.linear.kinds import blockwise, nvfp4, rowwise, tensorwise
from tests.proofs import noise

KINDS = [kind for kind in PRECISION_KINDS if kind != "none"]
MODES = [
    (kind, *modes)
    for kind in KINDS
    for modes in itertools.product(
        PRECISION_KINDS[kind].grad_input,
        PRECISION_KINDS[kind].grad_weight,
        PRECISION_KINDS[kind].grad_formats,
    )
]
T, K, N = 96, 128, 80


def _layer(dtype: torch.dtype, kind: str = "int8_rowcol", **keys: str | bool) -> linear.LowPrecisionLinear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    # Emulated: float8 has no GEMM on a CPU. INT8 gives the same bits either way.
    precision = PrecisionConfig(kind=kind, emulate=kind != "int8_rowcol", **keys)  # type: ignore[arg-type]
    plan = linear.convert(model, precision)
    layer = model[0]
    assert isinstance(layer, linear.LowPrecisionLinear)
    layer.plan = plan  # type: ignore[assignment]
    layer.handle[KEY] = 1  # for kinds that round stochastically
    return layer


def _first_step(layer: nn.Module) -> AbstractContextManager[None]:
    """Of a run, where delayed scaling has no history yet."""
    plan: Any = getattr(layer, "plan", None)
    return linear.DelayedScaling(plan, torch.device("cpu")).step() if plan else contextlib.nullcontext()


def _run(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with _first_step(layer):
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
    plain.load_state_dict({name: layer.state_dict()[name].double() for name in ("weight", "bias")})
    return _run(plain, x.double(), g.double())


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, K, generator=generator).to(dtype), torch.randn(T, N, generator=generator).to(dtype)


def _structured(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of every size in x with one outlier channel; small gradients, channels of every size."""
    generator = torch.Generator().manual_seed(2)
    x, g = torch.randn(T, K, generator=generator), torch.randn(T, N, generator=generator)
    x = x * torch.randn(T, 1, generator=generator).exp()
    x[:, 3] *= 100
    g = g * torch.randn(1, N, generator=generator).exp() * 1e-6
    return x.to(dtype), g.to(dtype)


def _multiplies(layer: linear.LowPrecisionLinear, gemm: str) -> bool:
    return layer.spec.is_low(gemm) and layer.spec.multiplies_in_8_bits


def _assert_predicted(layer: linear.LowPrecisionLinear, x: torch.Tensor, g: torch.Tensor) -> None:
    """Each GEMM is off by what its formats say: no more, and no less."""
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    truth["output"] = truth["output"] - layer.bias.detach().double()
    for gemm, predicted in noise.predicted_errors(
        layer.spec, x, linear.dequantized(layer.weight.detach()), g
    ).items():
        # The bias is added after rounding, and rounded with the sum.
        result = ours[gemm].double() - (layer.bias.detach().double() if gemm == "output" else 0.0)
        added = torch.finfo(x.dtype).eps / 2 * float(layer.bias.detach().norm()) if gemm == "output" else 0.0
        error = noise.relative_error(result, truth[gemm])
        assert predicted.least <= error <= predicted.bound + added, (gemm, error, predicted)
    # At most 96 additions in the compute dtype, each rounding by eps / 2 in random directions: sqrt(96) / 2
    # in the worst order, one where the sum is taken in float32 and rounded at the end.
    assert noise.relative_error(ours["grad_bias"], truth["grad_bias"]) <= 5 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "grad_input", "grad_weight", "grad_format"), MODES)
def test_every_gemm_of_every_kind_is_off_by_the_formats_noise_no_more_and_no_less(
    dtype: torch.dtype, kind: str, grad_input: str, grad_weight: str, grad_format: str
) -> None:
    layer = _layer(dtype, kind, grad_input=grad_input, grad_weight=grad_weight, grad_format=grad_format)
    _assert_predicted(layer, *_inputs(dtype))
    _assert_predicted(layer, *_structured(dtype))
    # A `least` of 0 would let a fall-back to the compute dtype pass.
    x, g = _inputs(dtype)
    for gemm, predicted in noise.predicted_errors(
        layer.spec, x, linear.dequantized(layer.weight.detach()), g
    ).items():
        assert predicted.least > 0.8 * predicted.expected or not _multiplies(layer, gemm), gemm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_where_one_element_dominates_or_results_are_denormal_errors_are_within_their_bounds(
    kind: str, dtype: torch.dtype
) -> None:
    """The rounding of one result is up to half a step; below the smallest normal number a step is absolute,
    and a unit may flush to zero.
    """
    layer = _layer(dtype, kind)
    with torch.no_grad():
        layer.bias.zero_()
    weight, (x, g) = layer.weight.detach().clone(), _inputs(dtype)
    for size in (30.0, 1e3, 1e5):
        for row in (0, 3):
            big_x, big_w, big_g = x.clone(), weight.clone(), g.clone()
            for each, column in ((big_x, 5), (big_w, 5), (big_g, row)):
                each[row, column] *= size
            with torch.no_grad():
                layer.weight.copy_(big_w)
            _assert_predicted(layer, big_x, big_g)
    for size in (10**-18.5, 1e-19, 10**-19.5, 1e-20):
        with torch.no_grad():
            layer.weight.copy_(size * weight)
        _assert_predicted(layer, size * x, size * g)


@pytest.mark.parametrize(
    ("kind", "grad_weight"),
    [
        ("int8_rowcol", "column"),
        ("int8_rowcol", "folded"),
        ("float8_rowwise", "column"),
        ("int8_tensorwise", "tensor"),
        ("float8_tensorwise", "tensor"),
    ],
)
def test_stochastic_rounding_of_g_adds_the_noise_of_its_fractions(kind: str, grad_weight: str) -> None:
    layer = _layer(torch.float32, kind, grad_weight=grad_weight, stochastic_rounding=True)
    plan = linear.Plan(kind, (linear.LayerPlan("", K, N, layer.spec),))
    linear.StochasticRounding(layer, plan, seed=0).start(0, 0)
    _assert_predicted(layer, *_inputs(torch.float32))
    _assert_predicted(layer, *_structured(torch.float32))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "high" in PRECISION_KINDS[kind].output])
def test_a_high_output_leaves_the_two_others_as_predicted(kind: str) -> None:
    _assert_predicted(_layer(torch.float32, kind, output="high"), *_inputs(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_tells_the_kinds_apart(kind: str) -> None:
    # A bound that any 8-bit path met would prove little: float8 must not pass for INT8, nor tensor for row.
    # (In float8 the step shrinks with the value, whatever shares a scale: there the errors are too alike.)
    layer, (x, g) = _layer(torch.float32, kind), _structured(torch.float32)
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    fits = set()
    for other in KINDS:
        spec = linear.LinearSpec.from_config(PrecisionConfig(kind=other))
        predicted = noise.predicted_errors(spec, x, linear.dequantized(layer.weight.detach()), g)
        errors = {gemm: noise.relative_error(ours[gemm], truth[gemm]) for gemm in GEMMS[1:]}
        if all(predicted[gemm].least <= errors[gemm] <= predicted[gemm].bound for gemm in errors):
            fits.add(other)
    assert kind in fits
    assert {name for name in fits if name.startswith("int8")} == (
        {kind} if kind.startswith("int8") else set()
    )
    assert fits == {kind} or not kind.startswith("int8")


@pytest.mark.parametrize(
    ("kind", "grad_weight"), sorted({(kind, grad_weight) for kind, _, grad_weight, _ in MODES})
)
def test_zero_rows_of_weight_and_input_take_nothing_from_the_others(kind: str, grad_weight: str) -> None:
    # A stand-in scale of 1 for a zero row would be folded into g and dwarf all other columns.
    layer, (x, g) = _layer(torch.float32, kind, grad_weight=grad_weight), _inputs(torch.float32)
    with torch.no_grad():
        layer.weight[5] = 0
    x[7] = 0
    _assert_predicted(layer, x, g)


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_token_and_an_odd_number_of_tokens_stay_within_the_bound(kind: str) -> None:
    layer, (x, g) = _layer(torch.bfloat16, kind), _inputs(torch.bfloat16)
    x, g = x[:37].clone(), g[:37].clone()
    x[3] *= 1000
    ours, truth = _run(layer, x, g), _truth(layer, x, g)
    for gemm, predicted in noise.predicted_errors(
        layer.spec, x, linear.dequantized(layer.weight.detach()), g
    ).items():
        # The outlier makes up the output; against it the bias and its rounding are nothing.
        assert noise.relative_error(ours[gemm], truth[gemm]) <= predicted.bound, gemm


def test_no_tokens_give_no_output_and_zero_gradients() -> None:
    layer = _layer(torch.float32)
    results = _run(layer, torch.zeros(0, K), torch.zeros(0, N))
    assert results["output"].shape == (0, N)
    assert results["grad_input"].shape == (0, K)
    assert (results["grad_weight"] == 0).all()


def test_folded_grad_weight_saves_the_input_in_8_bits() -> None:
    saved: list[torch.Tensor] = []
    layer, (x, _) = _layer(torch.bfloat16, grad_weight="folded"), _inputs(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x.requires_grad_())
    assert [t.dtype for t in saved if t.shape == (T, K)] == [torch.int8]


def _saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Of activations: what autograd saves beside the layer's parameters, each storage once."""
    own = {p.data_ptr() for p in layer.parameters()}
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in own and tensor.dim() == 2:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), _first_step(layer):
        layer(x.requires_grad_())
    return sum(saved.values())


# Eager in every mode, compiled in the default mode of the default kind.
FROZEN_MODES = [
    *((*mode, False) for mode in MODES),
    pytest.param(*MODES[0], True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "grad_input", "grad_weight", "grad_format", "compiled"), FROZEN_MODES)
def test_a_frozen_weight_saves_no_input_and_has_the_same_grad_input(
    kind: str, grad_input: str, grad_weight: str, grad_format: str, compiled: bool
) -> None:
    keys = {"grad_input": grad_input, "grad_weight": grad_weight, "grad_format": grad_format}
    layer, (x, g) = _layer(torch.bfloat16, kind, **keys), _inputs(torch.bfloat16)
    truth = _run(layer, x, g)
    size = x.numel() if grad_weight == "folded" or kind == "bitnet" else 2 * x.numel()
    assert _saved_bytes(layer, x.clone()) >= size
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    assert _saved_bytes(layer, x.clone()) == 0
    x = x.clone().requires_grad_()
    run = torch.compile(layer) if compiled else layer
    with _first_step(layer):
        run(x).backward(g)
    assert x.grad is not None
    assert torch.equal(x.grad, truth["grad_input"])
    assert layer.weight.grad is None


class _Copies(TorchDispatchMode):
    """Notes operations of torch, outside the ops of lptune, that write a tensor of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.itemsize == 1]
        is_view = any(each.alias_info for each in func._schema.returns)
        if made and not is_view and func.namespace != "lptune" and made[0].dtype != torch.bool:
            self.found.append(str(func))
        return out


LAYOUT_MODES = [
    *(mode for mode in MODES if linear.KINDS[mode[0]].operations),
    *(
        (kind, PRECISION_KINDS[kind].grad_input[0], PRECISION_KINDS[kind].grad_weight[0], "stochastic")
        for kind in KINDS
        if PRECISION_KINDS[kind].can_round_stochastically
    ),
]


@pytest.mark.parametrize(("kind", "grad_input", "grad_weight", "grad_format"), LAYOUT_MODES)
def test_where_the_device_wants_it_every_operand_is_stored_along_the_contraction(
    kind: str, grad_input: str, grad_weight: str, grad_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the GEMM copies it, for each layer anew, a byte at a time. What is stored changes no bit."""
    seen: list[bool] = []

    def watched(module: ModuleType, name: str) -> None:
        multiply = getattr(module, name)

        def call(a_MK: torch.Tensor, b_KN: torch.Tensor, *args: Any, **keys: Any) -> torch.Tensor:
            seen.append(a_MK.stride(1) == 1 and b_KN.stride(0) == 1)
            result: torch.Tensor = multiply(a_MK, b_KN, *args, **keys)
            return result

        monkeypatch.setattr(module, name, call)

    watched(rowwise, "scaled_mm")
    watched(tensorwise, "scaled_mm")
    watched(blockwise, "block_scaled_mm")
    watched(nvfp4, "nvfp4_mm")
    keys = {"grad_input": grad_input, "grad_weight": grad_weight, "grad_format": grad_format}
    if grad_format == "stochastic":
        keys = {"stochastic_rounding": True}
    layer = _layer(torch.bfloat16, kind, **keys)
    plan = linear.Plan(kind, (linear.LayerPlan("", K, N, layer.spec),))
    linear.StochasticRounding(layer, plan, seed=0).start(0, 0)
    x, g = _inputs(torch.bfloat16)
    expected = _run(layer, x, g)
    seen.clear()
    with planned_for("cuda"), _Copies() as copies:
        actual = _run(layer, x, g)
    assert seen == [True] * sum(layer.spec.is_low(gemm) for gemm in GEMMS)
    # x, which `folded` saves in 8 bits, is by tokens in `output` and by channels in grad_weight: one copy. A
    # weight that is used without quantizing it again is copied for grad_input in the same way.
    assert len(copies.found) == (layer.spec.grad_weight == "folded")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8_weight_only"])
def test_a_weight_of_another_dtype_is_cast_to_that_of_x_before_it_is_quantized(kind: str) -> None:
    """As in a gather in the compute dtype: the same bits."""
    (x, g), master, cast = _inputs(torch.bfloat16), _layer(torch.float32, kind), _layer(torch.bfloat16, kind)
    with torch.no_grad():
        master.bias.zero_()
        cast.weight.copy_(master.weight)
        cast.bias.zero_()
        assert not torch.equal(cast.weight.float(), master.weight)
    found, wanted = (_run(layer, x, g) for layer in (master, cast))
    for name in ("output", "grad_input", "grad_weight"):
        assert torch.equal(found[name].to(torch.bfloat16), wanted[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "grad_input"),
    [("int8_rowcol", "requantized"), ("int8_rowcol", "high"), ("float8_rowwise", "requantized")],
)
def test_a_weight_that_is_rounded_twice_is_predicted_from_both_sides(
    kind: str, grad_input: str, dtype: torch.dtype
) -> None:
    layer = _layer(dtype, kind, grad_input=grad_input)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, g = torch.randn(T, K, generator=generator), torch.randn(T, N, generator=generator)
        # Drawn in float32: torch 2.11 draws bfloat16 on a grid of 2^-8, which is no finer than INT8's own.
        weight = torch.rand(N, K, generator=generator)
        with torch.no_grad():
            layer.weight.copy_((2 * weight - 1) * K**-0.5)
        _assert_predicted(layer, x.to(dtype), g.to(dtype))


def _planted_db(kind: str, outlier: str, size: float) -> tuple[float, float]:
    """SQNR of output and grad_weight by float64, apart from the outlier's own row and column. A channel or a
    token of x, or both, is `size` times as large, and its weights or gradient as much smaller: it counts in
    the sums as the others do.
    """
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((256, 256), (192, 256), (256, 192)))
    if outlier in ("channel", "both"):
        x[:, 5], w[:, 5] = x[:, 5] * size, w[:, 5] / size
    if outlier in ("token", "both"):
        x[9], g[9] = x[9] * size, g[9] / size
    if outlier == "masked token":
        x[9], g[1::2] = x[9] * size, 0
    layer = nn.Linear(256, 192, bias=False)
    layer.load_state_dict({"weight": w})
    model = nn.Sequential(layer)
    linear.convert(model, PrecisionConfig(kind=kind, emulate=True, skip=()))
    out = model(x)
    out.backward(g)
    assert layer.weight.grad is not None
    others_T, others_K = torch.arange(256) != 9, torch.arange(256) != 5
    return (
        noise.sqnr_db(out.detach()[others_T], x.double()[others_T] @ w.double().t()),
        noise.sqnr_db(layer.weight.grad[:, others_K], g.double().t() @ x.double()[:, others_K]),
    )


# SQNR in dB of output and grad_weight: without an outlier; beside a channel, a token (that has a gradient, or
# has none) and both that are 1000 times as large. Measured; float8 has a scale of its own in each number.
PLANTED_DB = {
    "int8_rowcol": ((40.1, 40.1), (1.7, 40.1), (40.1, 1.3), (40.1, 1.3), (1.7, 1.3)),
    "int8_rotated": ((40.3, 39.8), (5.9, 13.0), (40.3, 39.8), (40.3, 40.2), (5.9, 13.0)),
    "int8_tensorwise": ((36.9, 37.0), (0, 0), (0, 0), (0, 0), (0, 0)),
    "float8_tensorwise": ((28.5, 24.6), (28.5, 24.6), (28.5, 24.6), (28.5, 24.6), (0.6, 0.6)),
    "float8_rowwise": ((28.5, 28.5),) * 5,
    "float8_blockwise": ((28.7, 28.7),) * 5,
    "mxfp8": ((28.5, 28.5),) * 5,
}


@pytest.mark.parametrize("kind", PLANTED_DB)
def test_what_an_outlier_leaves_of_the_others(kind: str) -> None:
    cases = (("none", 1), ("channel", 1000), ("token", 1000), ("masked token", 1000), ("both", 1000))
    for (outlier, size), expected in zip(cases, PLANTED_DB[kind], strict=True):
        assert _planted_db(kind, outlier, size) == pytest.approx(expected, abs=0.5), outlier


def test_a_rotation_spares_output_a_channel_and_brings_it_to_grad_weight() -> None:
    assert _planted_db("int8_rowcol", "channel", 100) == pytest.approx((12.5, 40.1), abs=0.5)
    assert _planted_db("int8_rotated", "channel", 100) == pytest.approx((25.7, 29.5), abs=0.5)
