"""A fall-back to compute dtype planted in one GEMM of one layer ends the run, and the layer is named."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lptune import linear
from lptune.cli import recipe
from lptune.config import FinetuneConfig, load_config

RECIPE = Path(__file__).parents[2] / "recipes" / "full_finetune.py"
LAYER = "model.layers.1.mlp.up_proj"


# All three, and compiled: tests/linear/steps/test_verify.py.
def test_the_run_fails_with_the_layers_name_unless_it_does_not_verify(
    monkeypatch: pytest.MonkeyPatch, tiny_config: Path, tmp_path: Path
) -> None:
    convert = linear.convert

    def convert_and_plant(model: nn.Module, *args: Any, **kwargs: Any) -> linear.Plan:
        plan = convert(model, *args, **kwargs)
        layer = model.get_submodule(LAYER)
        assert isinstance(layer, linear.LowPrecisionLinear)
        layer.spec = layer.spec._replace(grad_input="high")
        return plan

    monkeypatch.setattr(linear, "convert", convert_and_plant)
    keys = ["precision.kind=int8_rowcol", "eval_every_steps=0", "activation_checkpointing=selective"]
    said = f"layer {LAYER}: grad_input was to run .* ran 0 times"
    with pytest.raises(linear.PrecisionNotAppliedError, match=said):
        recipe.load_main(RECIPE)(load_config(FinetuneConfig, tiny_config, keys))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    unverified = load_config(FinetuneConfig, tiny_config, [*keys, "precision.verify=false", "num_steps=1"])
    recipe.load_main(RECIPE)(unverified)


def test_a_weight_that_is_gathered_in_high_precision_is_named(
    monkeypatch: pytest.MonkeyPatch, tiny_config: Path
) -> None:
    from lptune.linear import module

    convert, make_master = linear.convert, module.make_master
    planted: list[nn.Module] = []

    def convert_and_remember(model: nn.Module, *args: Any, **kwargs: Any) -> linear.Plan:
        plan = convert(model, *args, **kwargs)
        planted.append(model.get_submodule(LAYER))
        return plan

    def all_but_one(layer: nn.Linear, *args: Any) -> None:
        if layer not in planted:
            make_master(layer, *args)

    monkeypatch.setattr(linear, "convert", convert_and_remember)
    monkeypatch.setattr(module, "make_master", all_but_one)
    cfg = load_config(FinetuneConfig, tiny_config, ["precision.kind=int8_rowcol"])
    with pytest.raises(
        linear.PrecisionNotAppliedError, match=f"layer {LAYER}: its weight was to be gathered in 8 bits"
    ) as raised:
        recipe.load_main(RECIPE)(cfg)
    assert str(raised.value).count("layer ") == 1
