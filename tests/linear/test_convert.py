"""convert(): what it changes, what it leaves, what it refuses, what it says."""

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lptune import linear
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.kernels import record_gemms

INT8 = PrecisionConfig(kind="int8_rowcol")


class Tiny(nn.Module):
    """Two blocks and a head, optionally tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(32, 48), "odd": nn.Linear(48, 40), "down": nn.Linear(48, 32, bias=False)}
            )
            for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def test_parameters_names_and_state_dict_stay() -> None:
    model = Tiny()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    linear.convert(model, INT8)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == list(Tiny().state_dict())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_the_plan_gives_each_layer_its_gemms_or_its_reason() -> None:
    plan = linear.convert(Tiny(), INT8)
    rows = {row["name"]: row for row in json.loads(json.dumps(plan.to_json()))["layers"]}
    assert rows["layers.0.up"] | {"spec": None} == {
        "name": "layers.0.up",
        "shape": [48, 32],
        "output": "int8 row",
        "grad_input": "int8 folded",
        "grad_weight": "int8 column",
        "all_gather": "int8 rows",
        "spec": None,
        "reason": None,
    }
    assert rows["layers.1.odd"]["reason"] == "sizes are not multiples of 16"
    assert rows["layers.1.odd"]["output"] == "high"
    assert rows["lm_head"]["reason"] == "precision.skip: lm_head"
    assert [layer.name for layer in plan.converted] == [
        "layers.0.up",
        "layers.0.down",
        "layers.1.up",
        "layers.1.down",
    ]


def test_the_table_groups_by_the_first_number_of_a_name() -> None:
    def block() -> nn.Module:
        experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 48)}) for _ in range(2))
        return nn.ModuleDict({"experts": experts})

    plan = linear.convert(nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(3))}), INT8)
    assert [row[0] for row in plan.rows()] == ["layers.0-2.experts.0.up", "layers.0-2.experts.1.up"]


def test_a_tied_head_stays_high_and_tied() -> None:
    model = Tiny(tied=True)
    plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol", skip=()))
    assert {row.name: row.reason for row in plan.layers}["lm_head"] == "tied to another module's weight"
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize("pattern", ["layers.0.*", "up", "*.up", "layers.?.up"])
def test_skip_takes_names_and_globs(pattern: str) -> None:
    plan = linear.convert(Tiny(), INT8, skip=[pattern])
    skipped = [layer.name for layer in plan.layers if layer.reason == f"precision.skip: {pattern}"]
    assert skipped == (
        ["layers.0.up", "layers.0.odd", "layers.0.down"] if "0" in pattern else ["layers.0.up", "layers.1.up"]
    )


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"precision.skip: 'dwn' matches no linear layer \(did you mean 'down'\?\)"
    ):
        linear.convert(Tiny(), INT8, skip=["dwn"])


def test_converting_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="would convert no layer"):
        linear.convert(Tiny(), INT8, skip=["*"])
    with pytest.raises(UserError, match=r"no nn\.Linear"):
        linear.convert(nn.Embedding(4, 4), INT8)


def test_converting_twice_is_an_error() -> None:
    model = Tiny()
    linear.convert(model, INT8)
    with pytest.raises(UserError, match="converted before"):
        linear.convert(model, INT8)


def test_kind_none_converts_nothing_and_lists_all() -> None:
    model = Tiny()
    plan = linear.convert(model, PrecisionConfig())
    assert len(plan.layers) == 7
    assert not plan.converted
    assert not any(isinstance(module, linear.LowPrecisionLinear) for module in model.modules())


def test_unconvert_restores_plain_layers_with_the_same_parameters() -> None:
    model = Tiny()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    linear.convert(model, INT8)
    assert linear.unconvert(model) == 4
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not any(isinstance(module, linear.LowPrecisionLinear) for module in model.modules())


def test_a_model_on_meta_can_be_converted_and_then_loaded() -> None:
    with torch.device("meta"):
        model = Tiny()
    linear.convert(model, INT8)
    model.to_empty(device="cpu")
    model.load_state_dict(Tiny().state_dict())
    x = torch.randn(3, 32)
    with record_gemms() as executed:
        assert model.layers[0]["up"](x).shape == (3, 48)  # type: ignore[index]
    assert list(executed.values()) == [1]


def test_a_module_under_two_names_is_converted_once_and_stays_one() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    model["again"] = model["a"]
    plan = linear.convert(model, INT8)
    assert [layer.name for layer in plan.converted] == ["a", "b"]
    assert model["again"] is model["a"]
    assert isinstance(model["again"], linear.LowPrecisionLinear)


def test_hooks_and_a_bare_linear_are_kept() -> None:
    layer = nn.Linear(32, 16)
    seen: list[torch.Size] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    linear.convert(layer, INT8)
    layer(torch.randn(4, 32))
    assert seen == [(4, 16)]
    assert linear.unconvert(layer) == 1
    assert type(layer) is nn.Linear


def test_a_subclass_of_linear_stands_in_the_plan_with_its_reason() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "mlp": nn.Linear(32, 32)})
    reasons = {layer.name: layer.reason for layer in linear.convert(model, INT8).layers}
    assert reasons["attention.out_proj"] == "a subclass of nn.Linear: NonDynamicallyQuantizableLinear"
    assert reasons["mlp"] is None


def test_autocast_decides_the_compute_dtype_as_for_nn_linear() -> None:
    layer = nn.Linear(32, 16)
    linear.convert(layer, INT8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(4, 32)).dtype == torch.bfloat16


def _wrapped_in_a_closure(layer: nn.Linear) -> None:
    """As transformers' tensor parallelism does."""
    old = layer.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * old(*args, **kwargs)

    layer.forward = forward


def _wrapped_by_accelerate(layer: nn.Linear) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(layer, AlignDevicesHook("cpu"))


def _wrapped_in_a_partial(layer: nn.Linear) -> None:
    layer.forward = functools.partial(lambda old, x: 2 * old(x), layer.forward)


def _wrapped_twice(layer: nn.Linear) -> None:
    _wrapped_in_a_closure(layer)
    _wrapped_in_a_partial(layer)


@pytest.mark.parametrize(
    ("wrap", "factor"),
    [
        (_wrapped_in_a_closure, 2),
        (_wrapped_by_accelerate, 1),
        (_wrapped_in_a_partial, 2),
        (_wrapped_twice, 4),
    ],
)
def test_a_forward_of_the_instance_calls_the_converted_one(
    wrap: Callable[[nn.Linear], None], factor: int
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(8, 32)
    model = nn.Sequential(layer)
    wrap(layer)
    plain = model(x)
    plan = linear.convert(model, "int8_rowcol")
    with linear.verify_step(model, plan, 1):
        out = model(x)
        out.sum().backward()
    assert 0 < (out - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(copy.deepcopy(model)(x), out)
    reference = nn.Linear(32, 48)
    reference.load_state_dict(layer.state_dict())
    linear.convert(reference, "int8_rowcol")
    assert torch.equal(out, factor * reference(x))
    linear.unconvert(model)
    assert torch.equal(model(x), plain)


def test_a_forward_of_the_instance_that_multiplies_by_itself_is_one_line_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    last = model[1]
    last.forward = lambda x: nn.functional.linear(x, last.weight)
    with pytest.raises(UserError, match=r"layer 1: its instance attribute forward .* hides the forward"):
        linear.convert(model, "int8_rowcol")
    assert type(model[0]) is nn.Linear
    linear.convert(model, "int8_rowcol", skip=["1"])
