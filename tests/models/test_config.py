"""config.json is read as transformers reads it; what cannot be followed exactly is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lptune.config import UserError
from lptune.models import PRESETS, config_from_dict, read_config
from lptune.models.families import DEFAULTS


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    for key, value in DEFAULTS[family].items():
        if key in ("num_key_value_heads",) and value is None:
            assert theirs.num_key_value_heads == theirs.num_attention_heads
        elif key == "hidden_act" and not hasattr(theirs, key):
            assert hasattr(theirs, "hidden_activation")
        elif key == "sliding_window" and getattr(theirs, "use_sliding_window", True) is False:
            assert theirs.sliding_window is None  # transformers forgets it while windows are off
        else:
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_with_nothing_but_its_family_is_read(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    ours = config_from_dict({"model_type": family})
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
    "unknown family": ({"model_type": "lama"}, "'lama' is not supported (llama"),
    "family named": ({"model_type": "mixtral"}, "olmo2"),
    "no family": ({"model_type": None}, "expected one of llama"),
    "multimodal": ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "multimodal"),
    "multimodal gemma": ({"model_type": "gemma3"}, "multimodal"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized (fp8)"),
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
    "nope list": ({"model_type": "smollm3", "no_rope_layers": [1]}, "expected a list of 36 entries"),
}


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
        ('{\n"model_type": "llama",\n}', "line 3: not JSON"),
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
