"""The same random checkpoint in transformers and here: what the parity tests compare."""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lptune.models import PRESETS, Decoder, DocumentBounds, build_on_meta, config_from_dict


def _variant(family: str, **changes: Any) -> dict[str, Any]:
    return PRESETS[family]["tiny"] | changes


def _without(family: str, *keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _variant(family, **changes).items() if key not in keys}


_LONG = {"short_factor": [1.0 + i / 16 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    f"{family}-tiny": sizes["tiny"] for family, sizes in PRESETS.items()
} | {
    "llama-default-rope-mha": _without("llama3_2", "rope_scaling", "head_dim", num_key_value_heads=4),
    "llama-linear-rope": _variant("llama3_2", rope_scaling={"type": "linear", "factor": 3.0}),
    "llama-yarn-rope": _variant("llama3_2", rope_scaling=_YARN),
    "llama-yarn-untruncated": _variant(
        "llama3_2",
        rope_scaling=_YARN | {"truncate": False, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "llama-longrope": _variant(
        "llama3_2",
        rope_scaling=_LONG | {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 32},
    ),
    "llama-biases-untied": _variant(
        "llama3_2", attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "llama-rope-parameters": _without(
        "llama3_2",
        "rope_scaling",
        "rope_theta",
        rope_parameters=PRESETS["llama3_2"]["tiny"]["rope_scaling"] | {"rope_theta": 3000.0},
    ),
    "llama-gelu": _variant("llama3_2", hidden_act="gelu"),
    "llama-minimal": _without(
        "llama3_1",
        "architectures",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "initializer_range",
        "head_dim",
        num_key_value_heads=None,
    ),
    "mistral-no-window": _variant("mistral", sliding_window=None),
    "mistral-default-window": _without("mistral", "sliding_window"),
    "qwen2-no-window-untied": _variant("qwen2_5", use_sliding_window=False, tie_word_embeddings=False),
    "qwen2-layer-types": _variant("qwen2_5", layer_types=["sliding_attention", "full_attention"]),
    "qwen3-biases-window": _variant(
        "qwen3", attention_bias=True, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3-yarn": _variant("qwen3", rope_scaling=_YARN, num_key_value_heads=1),
    "gemma2-biases-no-caps": _variant(
        "gemma2", attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma2-untied-mha": _variant("gemma2", tie_word_embeddings=False, num_key_value_heads=4),
    "gemma3-linear-full-rope": _variant("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3-rope-parameters": _without(
        "gemma3",
        "rope_scaling",
        "rope_theta",
        "rope_local_base_freq",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    ),
    "gemma3-logit-cap": _variant("gemma3", final_logit_softcapping=20.0, attention_bias=True),
    "phi3-default-rope-window": _variant(
        "phi4", rope_scaling=None, partial_rotary_factor=1.0, sliding_window=16, num_key_value_heads=2
    ),
    "phi3-su-untied": _variant(
        "phi4",
        rope_scaling=PRESETS["phi4"]["tiny"]["rope_scaling"]
        | {"type": "su", "original_max_position_embeddings": 32},
        tie_word_embeddings=False,
    ),
    "olmo2-mha-biases": _variant(
        "olmo2", attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "olmo2-yarn": _variant("olmo2", rope_scaling=_YARN),
    "smollm3-listed-window": _variant(
        "smollm3",
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=16,
        attention_bias=True,
    ),
    "olmo3-rope-parameters-biases": _without(
        "olmo3",
        "rope_scaling",
        "rope_theta",
        attention_bias=True,
        rope_parameters={
            "full_attention": _YARN | {"rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    ),
    "ministral3-default-rope-window": _variant(
        "ministral3",
        sliding_window=16,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "gemma-biases-untied": _variant(
        "gemma", hidden_act="gelu_new", attention_bias=True, tie_word_embeddings=False
    ),
    "seed_oss-other-biases": _variant(
        "seed_oss", attention_bias=False, attention_out_bias=True, mlp_bias=True, rope_scaling=_YARN
    ),
    "hunyuan-default-rope-biases": _variant("hunyuan", rope_scaling=None, attention_bias=True),
    "ernie4_5-yarn-untied": _variant(
        "ernie4_5", use_bias=False, rope_scaling=_YARN, tie_word_embeddings=False
    ),
    "exaone4-listed-without-window": _variant(
        "exaone4",
        layer_types=["full_attention"] * 4,
        sliding_window=None,
        sliding_window_pattern="LLLG",
        rope_scaling={"type": "linear", "factor": 3.0},
        tie_word_embeddings=True,
    ),
    "granite-biases-untied": _variant(
        "granite3", attention_bias=True, mlp_bias=True, tie_word_embeddings=False, logits_scaling=3.0
    ),
}
"""Name -> content of a config.json. Every family's tiny preset, then what the tiny presets leave out."""


class Twins(NamedTuple):
    """Equal weights, two implementations."""

    ours: Decoder
    theirs: nn.Module


def randomize_(model: nn.Module, seed: int) -> None:
    """Weights that keep activations near 1; norms and biases away from 1 and 0, which would hide them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            else:  # a norm: keep its identity (1, or 0 in Gemma) as the centre
                parameter.add_(0.3 * noise)


def twins(content: dict[str, Any], seed: int = 0) -> Twins:
    """One random float32 checkpoint of this config, in both implementations; theirs with eager attention."""
    # transformers writes defaults into the dicts that it is given
    theirs_content = copy.deepcopy({key: value for key, value in content.items() if key != "dtype"})
    hf_config = transformers.AutoConfig.for_model(**theirs_content)
    hf_config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config).float().train()
    randomize_(theirs, seed)
    ours = build_on_meta(config_from_dict(content))
    ours.to_empty(device="cpu")
    ours.load_state_dict(theirs.state_dict())
    return Twins(ours, theirs)


def random_tokens(batch: int, seq_len: int) -> Tensor:
    return torch.randint(0, 256, (batch, seq_len), generator=torch.Generator().manual_seed(1))


def random_labels(tokens_BS: Tensor) -> Tensor:
    """Some word for two tokens in three, no loss on the third."""
    generator = torch.Generator().manual_seed(2)
    labels_BS = torch.randint(0, 256, tokens_BS.shape, generator=generator)
    return labels_BS.masked_fill(torch.rand(tokens_BS.shape, generator=generator) < 1 / 3, -100)


def summed_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=-100, reduction="sum"
    )


def packed(lengths_of_rows: list[list[int]]) -> DocumentBounds:
    """The DocumentBounds of rows with documents of these lengths, offsets padded by three."""
    seq_len = sum(lengths_of_rows[0])
    assert all(sum(lengths) == seq_len for lengths in lengths_of_rows)
    positions = [[i for length in lengths for i in range(length)] for lengths in lengths_of_rows]
    index = [[d for d, length in enumerate(lengths) for _ in range(length)] for lengths in lengths_of_rows]
    flat = [length for lengths in lengths_of_rows for length in lengths]
    offsets = [sum(flat[:i]) for i in range(len(flat) + 1)] + [sum(flat)] * 3
    return DocumentBounds(
        torch.tensor(positions), torch.tensor(index), torch.tensor(offsets, dtype=torch.int32)
    )
