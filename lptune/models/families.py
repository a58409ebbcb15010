"""Which config.json means which decoder: the supported families, one short function each.

To add a family: put transformers' defaults for its config class into `DEFAULTS`, write a function that turns
the keys into a `DecoderConfig` (usually `replace(_llama_like(keys), ...)` with the two or three fields that
differ), and enter it in `FAMILIES`; then a `tiny` preset in presets.py makes the parity tests run over it. If
no field of `DecoderConfig` can say what the family does, add a field and use it in decoder.py. Imports no
torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lptune.config import UserError
from lptune.models.config import DecoderConfig, LayerConfig
from lptune.models.keys import Keys
from lptune.models.rope_config import read_rope, read_rope_per_layer_type

MAX_LAYERS = 4096
"""More would be built for minutes before the weights contradict them."""
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = _COMMON | {
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
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
    "phi3": _COMMON
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "olmo2": _COMMON | {"vocab_size": 50304, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "smollm3": _COMMON
    | {
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
    "granite": _COMMON
    | {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
}
"""What transformers takes for a key that config.json does not have."""


def _head_dim(keys: Keys) -> int:
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    given = keys.optional_integer("head_dim")
    if given is None and hidden_size % num_heads:
        raise keys.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    return given or hidden_size // num_heads


def _window(keys: Keys) -> int:
    window = keys.optional_integer("sliding_window")
    if window is None:
        raise keys.error("sliding_window", "layers of type sliding_attention need a window, found null")
    return window


def _layer_types(keys: Keys, default: list[str]) -> list[str]:
    """`layer_types` where the file has it, checked; else the family's own pattern."""
    types = keys.get("layer_types") or default
    if not isinstance(types, list) or len(types) != keys.integer("num_hidden_layers"):
        raise keys.error("layer_types", f"expected a list of {keys.integer('num_hidden_layers')} entries")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.error("layer_types", f"{kind!r} is not supported (full_attention, sliding_attention)")
    return types


def _llama_like(keys: Keys) -> DecoderConfig:
    """What all families share: Llama's block, one rope, no windows, no biases."""
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise keys.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    num_layers = keys.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"{num_layers} is more than any model has; download it again")
    head_dim = _head_dim(keys)
    activation_key = "hidden_activation" if keys.get("hidden_activation") else "hidden_act"
    activation = keys.text(activation_key)
    if activation not in ACTIVATIONS:
        raise keys.error(activation_key, f"{activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return DecoderConfig(
        family=keys.text("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope=None),) * num_layers,
        norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        activation=activation,
        tied=keys.flag("tie_word_embeddings"),
        attention_scale=head_dim**-0.5,
        initializer_range=keys.number("initializer_range"),
    )


def _llama(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    layer = LayerConfig(rope=read_rope(keys, head_dim=config.head_dim))
    bias = keys.flag("attention_bias")
    return replace(
        config,
        layers=(layer,) * config.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def _mistral(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    keys.refuse("layer_types", "windows that differ between layers are not part of the mistral family")
    window = keys.optional_integer("sliding_window")
    layer = LayerConfig(window=window, rope=read_rope(keys, head_dim=config.head_dim))
    return replace(config, layers=(layer,) * config.num_layers)


def _qwen2(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    rope = read_rope(keys, head_dim=config.head_dim)
    has_window = keys.flag("use_sliding_window") and keys.get("sliding_window") is not None
    first = keys.count("max_window_layers") if has_window else config.num_layers
    pattern = ["full_attention" if i < first else "sliding_attention" for i in range(config.num_layers)]
    kinds = {"full_attention": LayerConfig(rope=rope)}
    types = _layer_types(keys, pattern)
    if "sliding_attention" in types:
        if not keys.flag("use_sliding_window"):
            raise keys.error("layer_types", "sliding_attention contradicts use_sliding_window: false")
        kinds["sliding_attention"] = LayerConfig(window=_window(keys), rope=rope)
    return replace(config, layers=tuple(kinds[kind] for kind in types), qkv_bias=True)


def _qwen3(keys: Keys) -> DecoderConfig:
    bias = keys.flag("attention_bias")
    return replace(_qwen2(keys), qkv_bias=bias, output_bias=bias, qk_norm="head")


def _gemma(keys: Keys) -> DecoderConfig:
    """What Gemma 2 and 3 share; the layers are still to be filled in."""
    config = _llama_like(keys)
    bias = keys.flag("attention_bias")
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5,
        norm_placement="both",
        norm_adds_one=True,
    )


def _gemma2(keys: Keys) -> DecoderConfig:
    config = _gemma(keys)
    rope = read_rope(keys, head_dim=config.head_dim)
    pattern = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.num_layers)]
    kinds = {
        "full_attention": LayerConfig(rope=rope),
        "sliding_attention": LayerConfig(window=_window(keys), rope=rope),
    }
    layers = tuple(kinds[kind] for kind in _layer_types(keys, pattern))
    return replace(config, layers=layers, attention_softcap=keys.optional_number("attn_logit_softcapping"))


def _gemma3(keys: Keys) -> DecoderConfig:
    config = _gemma(keys)
    keys.refuse(
        "attn_logit_softcapping",
        "not part of the gemma3_text family (transformers ignores it); set it to null",
    )
    ropes = read_rope_per_layer_type(
        keys, head_dim=config.head_dim, global_theta=1_000_000.0, local_theta=10_000.0
    )
    every = keys.optional_integer("sliding_window_pattern") or 6
    pattern = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(config.num_layers)]
    kinds = {
        "full_attention": LayerConfig(rope=ropes["full_attention"]),
        "sliding_attention": LayerConfig(window=_window(keys), rope=ropes["sliding_attention"]),
    }
    layers = tuple(kinds[kind] for kind in _layer_types(keys, pattern))
    return replace(config, layers=layers, qk_norm="head")


def _phi3(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    # Early Phi-3 files call longrope "su"; transformers reads "yarn" as longrope here too.
    rope = read_rope(
        keys, head_dim=config.head_dim, aliases={"su": "longrope", "yarn": "longrope"}, partial=True
    )
    layer = LayerConfig(window=keys.optional_integer("sliding_window"), rope=rope)
    return replace(config, layers=(layer,) * config.num_layers, fused_projections=True)


def _olmo2(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    layer = LayerConfig(rope=read_rope(keys, head_dim=config.head_dim))
    bias = keys.flag("attention_bias")
    return replace(
        config,
        layers=(layer,) * config.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        norm_placement="post",
        qk_norm="full",
    )


def _smollm3(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    rope = read_rope(keys, head_dim=config.head_dim, default_theta=2_000_000.0)
    every = keys.integer("no_rope_layer_interval")
    uses_rope = keys.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(config.num_layers)]
    if not isinstance(uses_rope, list) or len(uses_rope) < config.num_layers:
        raise keys.error(
            "no_rope_layers", f"expected a list of {config.num_layers} entries, 1 for rope, 0 for none"
        )
    sliding = keys.flag("use_sliding_window")
    has_window = sliding and keys.get("sliding_window") is not None
    pattern = [
        "sliding_attention" if has_window and not rope_on else "full_attention" for rope_on in uses_rope
    ]
    types = _layer_types(keys, pattern[: config.num_layers])
    bias = keys.flag("attention_bias")
    return replace(
        config,
        layers=tuple(
            LayerConfig(
                window=_window(keys) if sliding and kind == "sliding_attention" else None,
                rope=rope if rope_on else None,
            )
            for kind, rope_on in zip(types, uses_rope, strict=False)
        ),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def _granite(keys: Keys) -> DecoderConfig:
    return replace(
        _llama(keys),
        attention_scale=keys.number("attention_multiplier"),
        embedding_scale=keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        logit_divisor=keys.number("logits_scaling"),
    )


FAMILIES: dict[str, Callable[[Keys], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
}
"""`model_type` -> how its config.json is read."""


def _check_supported(keys: Keys) -> str:
    """The family, or a UserError for everything that a plain dense decoder cannot do exactly."""
    family = keys.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(family, str):
        raise keys.error("model_type", f"missing; expected one of {supported}")
    if keys.get("vision_config") is not None or family == "gemma3":
        raise keys.error(
            "model_type", f"{family!r} is multimodal; only text decoders can be trained ({supported})"
        )
    if family not in FAMILIES:
        # No nearest name: qwen3_moe is no misspelt qwen3. A config.json is written by programs.
        raise keys.error("model_type", f"{family!r} is not supported ({supported})")
    quantization = keys.get("quantization_config") or keys.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise keys.error(
            "quantization_config",
            f"the checkpoint is quantized ({method}); start from its unquantized original",
        )
    names = keys.get("architectures")
    if names and not isinstance(names, list):
        raise keys.error("architectures", f"expected a list of names, found {names!r}")
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise keys.error("architectures", f"expected a ...ForCausalLM checkpoint, found {names}")
    # Not attention_dropout: published Granite 3 folders carry 0.1, it changes no logits, and fine-tuning
    # without it is what people do. It is ignored and kept in the export (docs/models.md).
    for key in ("resid_pdrop", "embd_pdrop", "hidden_dropout"):
        keys.refuse(key, f"dropout is not supported, found {keys.get(key)}; set it to 0.0")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        keys.refuse(key, "mixtures of experts are not supported; choose a dense checkpoint")
    keys.refuse("use_bidirectional_attention", "only causal attention is supported")
    keys.refuse("per_layer_config", "layers of different shapes are not supported")
    return family


def config_from_keys(keys: Keys) -> DecoderConfig:
    """The decoder that a config.json describes. UserError in one line for what is unknown or unsupported."""
    family = _check_supported(keys)
    return FAMILIES[family](keys.with_defaults(DEFAULTS[family]))


def config_from_dict(content: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The same for the content of a config.json that is not in a file (a preset)."""
    return config_from_keys(Keys(content, {}, where))


def read_config(folder: Path) -> DecoderConfig:
    """The decoder of the Hugging Face checkpoint in `folder`.

    Raises UserError in one line for a missing or broken config.json, an unknown family, a quantized or
    multimodal checkpoint, and every setting that this library could not follow exactly.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not found; expected the folder of a Hugging Face checkpoint")
    return config_from_keys(Keys.from_file(folder / "config.json"))
