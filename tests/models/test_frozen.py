"""Freezing by name: what a pattern matches, and what is a mistake."""

import copy
from typing import Any

import pytest

from lptune import linear, models
from lptune.base.errors import UserError


def _model(**changed: Any) -> models.Decoder:
    content = copy.deepcopy(models.PRESETS["llama3_2"]["tiny"]) | {"num_hidden_layers": 12} | changed
    return models.build_on_meta(models.config_from_dict(content, "tiny"))


def _frozen(model: models.Decoder) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "regular"),
    [
        ("model.embed_tokens.weight", {"model.embed_tokens.weight"}),
        ("embed_tokens", {"model.embed_tokens.weight"}),
        ("model.norm.*", {"model.norm.weight"}),
        ("layers.1.mlp", {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}),
        ("model.layers.[0-3].*.q_proj", {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(4)}),
        ("q_proj", {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(12)}),
        (
            "*norm*",
            {"model.norm.weight"}
            | {f"model.layers.{n}.input_layernorm.weight" for n in range(12)}
            | {f"model.layers.{n}.post_attention_layernorm.weight" for n in range(12)},
        ),
    ],
)
def test_a_pattern_freezes_parameters_and_modules_by_their_names(pattern: str, regular: set[str]) -> None:
    model = _model()
    models.freeze(model, [pattern])
    assert _frozen(model) == regular


def test_the_number_of_a_block_is_not_a_prefix_of_others() -> None:
    model = _model()
    models.freeze(model, ["model.layers.1"])
    assert {name.split(".")[2] for name in _frozen(model)} == {"1"}


def test_either_name_of_a_tied_weight_freezes_it() -> None:
    for name in ("lm_head", "embed_tokens"):
        model = _model(tie_word_embeddings=True)
        models.freeze(model, [name])
        assert _frozen(model) == {"model.embed_tokens.weight"}
        assert not model.lm_head.weight.requires_grad
    untied = _model(tie_word_embeddings=False)
    models.freeze(untied, ["lm_head"])
    assert _frozen(untied) == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embed_token"], "freeze: 'embed_token' matches no parameter (did you mean 'embed_tokens'?)"),
        (["model.layer.0"], "freeze: 'model.layer.0' matches no parameter (did you mean 'model.layers.0'?)"),
        (["*norm*", ""], "freeze: '' matches no parameter"),
        (["*"], "freeze: every parameter is frozen, so there is nothing to train; leave some out"),
        (["model"], "freeze: every parameter is frozen, so there is nothing to train; leave some out"),
    ],
)
def test_a_pattern_without_a_match_and_freezing_everything_are_mistakes(
    patterns: list[str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        models.freeze(_model(tie_word_embeddings=True), patterns)
    assert str(error.value) == message


@pytest.mark.parametrize("kind", ["none", "int8_rowcol"])
def test_the_plan_names_what_is_frozen_and_counts_two_gemms_for_it(kind: str) -> None:
    plans = []
    for patterns in ([], ["model.layers.[0-5].mlp", "model.norm"]):
        model = _model()
        models.freeze(model, patterns)
        plans.append(linear.convert(model, kind))
    whole, part = plans
    rows = {row[0]: row for row in part.rows()}
    column = linear.plan.PLAN_COLUMNS.index("grad_weight")
    assert rows["model.layers.0-5.mlp.up_proj"][column] == "frozen"
    assert rows["model.layers.6-11.mlp.up_proj"][column] != "frozen"
    assert part.table().splitlines()[-1] == (
        "frozen, without gradient and optimizer state: 19 parameters: model.layers.0-5.mlp.gate_proj.weight, "
        "model.layers.0-5.mlp.up_proj.weight, model.layers.0-5.mlp.down_proj.weight, model.norm.weight"
    )
    assert part.to_json()["frozen"] == list(part.frozen)
    assert "frozen" not in whole.table()
    mlp = 6 * 3 * 64 * 128  # weights of the frozen MLPs: one GEMM of 2 FLOPs each is saved
    assert whole.flops_per_token - part.flops_per_token == 2 * mlp
