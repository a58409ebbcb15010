"""For each family, the default and the type of each key of config.json.

Both are the same as in the config classes of transformers, which do not load a file with a value of another
type. This file imports no torch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lptune.models.keys import Keys


class Dims(NamedTuple):
    """The sizes of a decoder that every config.json has."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int | None
    """None: as many as query heads."""

    def keys(self, *, max_len: int, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
        """These sizes, the longest document, the norms' epsilon and whether the head is tied, as keys."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": max_len,
            "rms_norm_eps": eps,
            "tie_word_embeddings": tied,
        }


_COMMON: dict[str, Any] = {
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "use_cache": True,
}
_SILU = _COMMON | {"hidden_act": "silu"}
BIASES = {"attention_bias": False, "mlp_bias": False}
_LLAMA = _SILU | Dims(32000, 4096, 11008, 32, 32, None).keys(max_len=2048)
_MISTRAL_DIMS = Dims(32000, 4096, 14336, 32, 32, 8)
_QWEN = (
    _SILU
    | Dims(151936, 4096, 22016, 32, 32, 32).keys(max_len=32768)
    | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
)
_OLMO = (
    _SILU
    | Dims(50304, 4096, 11008, 32, 32, None).keys(max_len=2048, eps=1e-5)
    | {"attention_bias": False, "pad_token_id": 1}
)
_GEMMA = _COMMON | {
    "head_dim": 256,
    "attention_bias": False,
    "use_bidirectional_attention": None,
    "pad_token_id": 0,
}
_GEMMA2 = _GEMMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_DIMS = Dims(256000, 2304, 9216, 26, 8, 4)

# Dims: vocabulary, hidden, MLP, layers, query heads, key heads
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | BIASES | {"head_dim": None, "pretraining_tp": 1},
    "mistral": _SILU | _MISTRAL_DIMS.keys(max_len=131072) | {"head_dim": None, "sliding_window": 4096},
    "ministral3": _SILU
    | _MISTRAL_DIMS._replace(vocab=131072, layers=34).keys(max_len=262144, eps=1e-5)
    | {"head_dim": 128, "sliding_window": None, "pad_token_id": 11},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma": _GEMMA
    | Dims(256000, 3072, 24576, 28, 16, 16).keys(max_len=8192, tied=True)
    | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _GEMMA2
    | _GEMMA2_DIMS.keys(max_len=8192, tied=True)
    | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": _GEMMA2
    | _GEMMA2_DIMS._replace(vocab=262208).keys(max_len=131072, tied=True)
    | {
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "phi3": _SILU
    | Dims(32064, 3072, 8192, 32, 32, None).keys(max_len=4096, eps=1e-5)
    | {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": 32000,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"sliding_window": 4096},
    "smollm3": _SILU
    | BIASES
    | Dims(128256, 2048, 11008, 36, 16, 4).keys(max_len=32768, tied=True)
    | {
        "pad_token_id": 128004,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    "granite": _LLAMA
    | BIASES
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "seed_oss": _SILU
    | Dims(155136, 4096, 27648, 64, 80, 8).keys(max_len=524288)
    | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128}
    | {"attention_dropout": 0.1, "residual_dropout": 0.1, "pad_token_id": 1, "pretraining_tp": 1},
    "hunyuan_v1_dense": _SILU
    | Dims(290943, 4096, 11008, 32, 32, None).keys(max_len=2048, eps=1e-5)
    | {"attention_bias": False, "head_dim": None, "pad_token_id": 0, "pretraining_tp": 1},
    "ernie4_5": Dims(103424, 1024, 3072, 18, 16, 2).keys(max_len=131072, eps=1e-5, tied=True)
    | {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
    | {"use_bias": False, "head_dim": 128, "pad_token_id": 0},
    "exaone4": _SILU
    | Dims(102400, 4096, 16384, 32, 32, 32).keys(max_len=2048, eps=1e-5)
    | {"sliding_window": 4096, "sliding_window_pattern": 4},
}
"""The value that transformers uses for a key that config.json does not have."""

# Types of keys whose default does not show the type. The other keys have the type of their default.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "num_key_value_heads": (int,),
    "head_dim": (int,),
    "sliding_window": (int,),
    "sliding_window_pattern": (int, str),
    "pad_token_id": (int,),
    "pretraining_tp": (int,),
    "attn_logit_softcapping": (float,),
    "final_logit_softcapping": (float,),
    "use_bidirectional_attention": (bool,),
} | dict.fromkeys(
    (
        "attention_dropout",
        "residual_dropout",
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


_NULL: dict[str, tuple[str, ...]] = {
    "num_key_value_heads": (
        *("llama", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "smollm3", "granite"),
        *("seed_oss", "hunyuan_v1_dense", "ernie4_5"),
    ),
    "head_dim": ("llama", "mistral", "seed_oss", "hunyuan_v1_dense", "ernie4_5"),
    "attention_dropout": ("llama", "gemma2", "gemma3_text"),
    "pretraining_tp": ("llama",),
    "use_bias": ("ernie4_5",),
    "use_cache": ("ernie4_5",),
}
"""Keys that may be null in some families only: which."""


def may_be_null(family: str, key: str) -> bool:
    """Whether transformers loads a config.json of this family in which `key` is null."""
    if key in _NULL:
        return family in _NULL[key]
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
