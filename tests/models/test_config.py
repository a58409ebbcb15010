"""config.json is read as transformers reads it; what cannot be followed exactly is refused in one line."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from lptune.base.errors import UserError
from lptune.models import PRESETS, config_from_dict, read_config
from lptune.models.defaults import DEFAULTS, check_types
from lptune.models.keys import Keys


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = {field.name: field.default for field in fields(type(transformers.AutoConfig.for_model(family)))}
    assert {key: theirs[key] for key in DEFAULTS[family]} == DEFAULTS[family]


@pytest.mark.parametrize("family", DEFAULTS)
def test_values_of_another_type_are_refused_where_transformers_refuses_them(family: str) -> None:
    validators = type(transformers.AutoConfig.for_model(family)).__validators__

    def accepted(check: Callable[[], object]) -> bool:
        try:
            check()
        except (TypeError, UserError):
            return False
        return True

    for key in DEFAULTS[family]:
        for value in (None, 1, 0.5, True, "text", [1]):
            keys = Keys({key: value}, DEFAULTS[family], "config.json")
            theirs = accepted(lambda key=key, value=value: [check(value) for check in validators[key]])
            assert accepted(lambda keys=keys: check_types(keys, family)) == theirs, (key, value)


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_with_nothing_but_its_family_is_read(family: str) -> None:
    # transformers, too, builds no hunyuan_v1_dense without it.
    needed = {"head_dim": 128} if family == "hunyuan_v1_dense" else {}
    theirs = transformers.AutoConfig.for_model(family, **needed)
    ours = config_from_dict({"model_type": family} | needed)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_kv_heads == theirs.num_key_value_heads


@pytest.mark.parametrize("family", PRESETS)
def test_a_config_saved_by_transformers_is_the_same_decoder(family: str, tmp_path: Path) -> None:
    content = json.loads(json.dumps(PRESETS[family]["tiny"]))
    expected = config_from_dict(content)
    transformers.AutoConfig.for_model(**content).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved  # the new spelling, where the preset has the old
    assert read_config(tmp_path) == expected


def test_missing_window_is_the_default_and_null_is_none() -> None:
    assert config_from_dict({"model_type": "mistral"}).layers[0].window == 4096
    assert config_from_dict({"model_type": "mistral", "sliding_window": None}).layers[0].window is None


def test_gemma_patterns_place_the_sliding_layers() -> None:
    gemma2 = config_from_dict(PRESETS["gemma2"]["2b"])
    assert [layer.window for layer in gemma2.layers[:4]] == [4096, None, 4096, None]
    gemma3 = config_from_dict(PRESETS["gemma3"]["1b"])
    assert [layer.window for layer in gemma3.layers[:7]] == [512] * 5 + [None, 512]
    assert [layer.rope.theta for layer in gemma3.layers[4:6] if layer.rope] == [10_000.0, 1_000_000.0]
    assert len(gemma3.layer_kinds) == 2


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "lama"}, "'lama' is neither one of llama"),
    "family named": ({"model_type": "t5"}, "olmo2"),
    "no family": ({"model_type": None}, "expected one of llama"),
    "multimodal": ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "multimodal"),
    "multimodal gemma": ({"model_type": "gemma3"}, "multimodal"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq)"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "experts": ({"num_local_experts": 8}, "mixtures of experts"),
    "residual dropout": ({"model_type": "phi3", "resid_pdrop": 0.1}, "found 0.1"),
    "activation": ({"hidden_act": "sillu"}, "'sillu' is not one of"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    "unknown rope": ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "'yarm' is not supported"),
    "rope is no object": ({"rope_scaling": "linear"}, "expected an object, found 'linear'"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor"),
    "rope factor is text": (
        {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
        "expected a number above 0, found '8'",
    ),
    "llama3 ramp": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor",
    ),
    "nested rope": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
    "flat rope": (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
        "an object for each of",
    ),
    "longrope lengths": (
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        },
        "expected 48 numbers, found 1",
    ),
    "longrope without factors": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
        "short_factor: expected a list",
    ),
    "theta": ({"rope_theta": 1}, "rope_theta: must be above 1, found 1.0"),
    "original length": (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1},
        },
        "must be above 1, found 1",
    ),
    "first sliding layer": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "28"},
        "max_window_layers: expected an integer, 0 or above, found '28'",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "only 1.0"),
    "size is text": ({"hidden_size": "4096"}, "hidden_size: expected an integer above 0, found '4096'"),
    "size is null": ({"vocab_size": None}, "vocab_size: expected an integer above 0, found null"),
    "negative layers": ({"num_hidden_layers": -1}, "num_hidden_layers"),
    "flag is text": ({"tie_word_embeddings": "yes"}, "expected true or false, found 'yes'"),
    "heads": ({"num_attention_heads": 30}, "30 does not divide hidden_size 4096"),
    "key heads": ({"num_key_value_heads": 5}, "5 does not divide num_attention_heads 32"),
    "odd rotation": ({"head_dim": 5}, "even number of rotated dimensions, found 5"),
    "layer types": (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        "layer_types: expected a list of 32 entries",
    ),
    "kind of layer": (
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        "'chunked_attention' is not supported",
    ),
    "windows off and on": (
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "contradicts use_sliding_window",
    ),
    "window is null": ({"model_type": "gemma2", "sliding_window": None}, "need a window"),
    "mistral layer types": ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "layer_types"),
    "gemma3 score cap": ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "set it to null"),
    "bidirectional": ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "only causal"),
    "not causal": ({"is_causal": False}, "only causal attention is supported, found False"),
    "causal or not": ({"is_causal": None}, "only causal attention is supported, found None"),
    "windows of llama": ({"layer_types": ["sliding_attention"] * 32}, "not part of the llama family"),
    "weights elsewhere": ({"transformers_weights": "other.safetensors"}, "weights of another file are not"),
    "config elsewhere": ({"configuration_files": ["config.4.0.0.json"]}, "other files with settings"),
    "model inside": ({"text_config": {"vocab_size": 300}}, "a model inside another is not supported"),
    "dtype": ({"torch_dtype": "int8"}, "expected one of float32, bfloat16, float16, float64, found 'int8'"),
    "pad token": ({"pad_token_id": 32000}, "32000, outside of the vocabulary of 32000"),
    "default pad token": ({"model_type": "phi3", "vocab_size": 256}, "missing, which means 32000"),
    "head size is null": ({"model_type": "qwen2", "head_dim": None}, "head_dim: expected an integer above 0"),
    "scalar is no integer": ({"model_type": "gemma2", "query_pre_attn_scalar": 24.5}, "found 24.5"),
    "cap is an integer": ({"model_type": "gemma2", "final_logit_softcapping": 30}, "decimal point, found 30"),
    "windows of smollm3": (
        {"model_type": "smollm3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "contradicts use_sliding_window",
    ),
    "theta is too large for a float": (
        {"rope_theta": 10**400},
        "rope_theta: expected a number above 0, found 1",
    ),
    "theta is null": ({"rope_theta": None}, "rope_theta: expected a number above 0, found null"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "factor: missing; yarn needs it"),
    "original length is null": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": None}},
        "original_max_position_embeddings: expected an integer above 0, found null",
    ),
    "linear phi3": ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    "su without length": (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [], "long_factor": []}},
        "original_max_position_embeddings: missing beside the type su",
    ),
    "rope of a kind of layer": (
        {"rope_parameters": {"full_attention": None}},
        "not part of the llama family",
    ),
    "old name of the rope type": (
        {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}},
        "says type, which transformers ignores here; call it rope_type",
    ),
    "untruncated kind of layer": (
        {
            "model_type": "gemma3_text",
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        },
        "truncate: transformers ignores it",
    ),
    "queries without growth": (
        {"model_type": "ministral3", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope_scaling: llama_4_scaling_beta: expected a number above 0, found null",
    ),
    "queries without length": (
        {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "rope_parameters: original_max_position_embeddings: expected an integer above 0, found null",
    ),
    "dynamic without alpha": (
        {
            "model_type": "hunyuan_v1_dense",
            "head_dim": 128,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        "alpha: expected a number above 0, found null",
    ),
    "alpha of one pair": (
        {
            "model_type": "hunyuan_v1_dense",
            "head_dim": 2,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
        "alpha: 1000.0 cannot stretch 2 dimensions",
    ),
    "hunyuan without head size": ({"model_type": "hunyuan_v1_dense"}, "head_dim: missing"),
    "olmo3 window is null": ({"model_type": "olmo3", "sliding_window": None}, "need a window"),
    "exaone4 window is null": ({"model_type": "exaone4", "sliding_window": None}, "need a window"),
    "exaone4 listed window is null": (
        {
            "model_type": "exaone4",
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "sliding_window": None,
        },
        "need a window",
    ),
    "pattern is text": (
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern: expected an integer above 0, found 'LLLG'",
    ),
    "nope list": ({"model_type": "smollm3", "no_rope_layers": [1]}, "expected a list of 36 entries"),
}


def test_the_activation_is_read_from_the_key_of_the_family() -> None:
    assert config_from_dict({"model_type": "llama", "hidden_activation": "relu"}).activation == "silu"
    gemma2 = config_from_dict({"model_type": "gemma2", "hidden_act": "relu"})
    assert gemma2.activation == "gelu_pytorch_tanh"


def test_a_length_outside_of_the_rope_settings_is_not_that_of_a_kind_of_layer() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    content = {"original_max_position_embeddings": 32, "rope_parameters": {"full_attention": rope}}
    full = config_from_dict({"model_type": "gemma3_text"} | content).layers[5].rope
    assert full is not None
    assert full.original_max_position_embeddings == 64


def test_dropout_that_is_not_applied_is_noted() -> None:
    config = config_from_dict({"model_type": "granite", "attention_dropout": 0.1})
    assert config.notes == ("attention_dropout 0.1 is not applied: lptune trains without dropout",)
    assert len(config_from_dict({"model_type": "seed_oss"}).notes) == 2


def test_exaone4_rotates_in_layers_with_a_window_and_where_there_are_none() -> None:
    def layers(**more: Any) -> list[tuple[int | None, bool]]:
        config = config_from_dict({"model_type": "exaone4", "num_hidden_layers": 4} | more)
        return [(layer.window, layer.rope is not None) for layer in config.layers]

    assert layers() == [(4096, True)] * 3 + [(None, False)]
    full = ["full_attention"] * 4
    assert layers(layer_types=full) == [(None, False)] * 4
    assert layers(layer_types=full, sliding_window=None) == [(None, True)] * 4


def test_the_rope_theta_of_olmo3_is_that_of_layers_with_full_attention() -> None:
    layers = config_from_dict({"model_type": "olmo3", "rope_theta": 9000.0}).layers[2:4]
    assert [layer.rope.theta for layer in layers if layer.rope] == [500_000.0, 9000.0]


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_line_with_the_file_and_the_reason(case: str, tmp_path: Path) -> None:
    content, expected = REFUSALS[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | content))
    with pytest.raises(UserError) as refusal:
        read_config(tmp_path)
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path}/config.json: ")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "config.json: not found"),
        ('{\n"model_type": "llama",\n3}', "line 3: not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        (b"\xff\xfe{", "not UTF-8"),
    ],
)
def test_broken_files_are_refused_in_one_line(
    text: str | bytes | None, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=expected) as refusal:
        read_config(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: not found"):
        read_config(tmp_path / "nowhere")
