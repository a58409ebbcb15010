"""For each family, the default and the type of each key of config.json.

Both are the same as in the config classes of transformers, which do not load a file with a value of another
type. This file imports no torch.
"""

from typing import Any

from lptune.models.keys import Keys

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "use_cache": True,
}
_SILU: dict[str, Any] = _COMMON | {"hidden_act": "silu"}
_QWEN: dict[str, Any] = _SILU | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = _COMMON | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attention_bias": False,
    "use_bidirectional_attention": None,
    "pad_token_id": 0,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _SILU
    | {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
    "mistral": _SILU
    | {
        "head_dim": None,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma2": _GEMMA
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "phi3": _SILU
    | {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": 32000,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "olmo2": _SILU
    | {
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "pad_token_id": 1,
    },
    "smollm3": _SILU
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 128004,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    "granite": _SILU
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
}
"""The value that transformers uses for a key that config.json does not have."""

# Types of keys whose default does not show the type. The other keys have the type of their default.
_TYPES: dict[str, tuple[type, ...]] = {
    "num_key_value_heads": (int,),
    "head_dim": (int,),
    "sliding_window": (int,),
    "pad_token_id": (int,),
    "pretraining_tp": (int,),
    "attn_logit_softcapping": (float,),
    "final_logit_softcapping": (float,),
    "use_bidirectional_attention": (bool,),
} | dict.fromkeys(
    (
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "attention_multiplier",
    ),
    (int, float),
)
_TYPE_NAMES = {
    int: "an integer",
    float: "a number with a decimal point",
    bool: "true or false",
    str: "a string",
}


def may_be_null(family: str, key: str) -> bool:
    """Whether transformers loads a config.json of this family in which `key` is null."""
    if key == "num_key_value_heads":
        return family not in ("mistral", "gemma2", "gemma3_text")
    if key == "head_dim":
        return family in ("llama", "mistral")
    if key == "attention_dropout":
        return family in ("llama", "gemma2", "gemma3_text")
    return key.endswith("softcapping") or (key in _TYPES and float not in _TYPES[key])


def check_types(keys: Keys, family: str) -> None:
    """Raises UserError for a value of another type than the config class of transformers declares."""
    for key, default in DEFAULTS[family].items():
        value, types = keys.get(key), _TYPES.get(key, (type(default),))
        if value is None:
            if not may_be_null(family, key):
                raise keys.error(key, f"expected {_TYPE_NAMES[types[0]]}, found null; take the key out")
        elif type(value) not in types:
            expected = _TYPE_NAMES[types[0]] if len(types) == 1 else "a number"
            raise keys.error(key, f"expected {expected}, found {value!r}")
