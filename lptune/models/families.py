"""Reads config.json as a DecoderConfig: one short function for each supported family.

To add a family, put transformers' defaults for its config class into defaults.py, write a function that makes
a `DecoderConfig` of the keys (usually `replace(_llama_like(keys), ...)` with the two or three fields that
differ), and add it to `FAMILIES`. With a `tiny` preset in presets.py, the parity tests cover the family. If
no field of `DecoderConfig` expresses a feature of the family, add a field and use it in decoder.py. This file
imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lptune.models.config import ACTIVATIONS, DecoderConfig, LayerConfig
from lptune.models.defaults import DEFAULTS, check_types, may_be_null
from lptune.models.keys import Keys
from lptune.models.quantized import read_scheme
from lptune.models.rope_config import ROPE_KINDS, read_rope, read_rope_per_layer_type

MAX_LAYERS = 4096
"""Limit of blocks: building more would take minutes before the weights show that config.json is wrong."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Keys that make transformers read settings or weights from elsewhere, or build another kind of model.
_ELSEWHERE = {
    "mlp_layer_types": "layers of different shapes are",
    "mtp_layer_types": "layers of different shapes are",
    "transformers_weights": "weights of another file are",
    "text_config": "a model inside another is",
    "decoder": "a model inside another is",
    "generator": "a model inside another is",
    "text_encoder": "a model inside another is",
    "per_layer_config": "layers of different shapes are",
    "fusion_config": "fused modules are",
    "distributed_config": "a distributed layout is",
}


def _head_dim(keys: Keys) -> int:
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    given = keys.optional_integer("head_dim")
    if given is None and "head_dim" in keys.given and not may_be_null(keys.text("model_type"), "head_dim"):
        raise keys.error("head_dim", "expected an integer above 0, found null; take the key out")
    always_divides = keys.get("model_type") in ("llama", "gemma2", "gemma3_text")
    if hidden_size % num_heads and (given is None or always_divides):
        raise keys.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    return given or hidden_size // num_heads


def _window(keys: Keys) -> int:
    window = keys.optional_integer("sliding_window")
    if window is None:
        raise keys.error("sliding_window", "layers of type sliding_attention need a window, found null")
    return window


def _layer_types(keys: Keys, default: list[str]) -> list[str]:
    """`layer_types` of the file, checked; the family's pattern `default` if the file has no such key."""
    given = keys.get("layer_types")
    types = default if given is None else given
    if not isinstance(types, list) or len(types) != keys.integer("num_hidden_layers"):
        raise keys.error("layer_types", f"expected a list of {keys.integer('num_hidden_layers')} entries")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.error("layer_types", f"{kind!r} is not supported (full_attention, sliding_attention)")
    return types


def _alternating(
    keys: Keys, config: DecoderConfig, *, every: int, full: LayerConfig, sliding: LayerConfig
) -> DecoderConfig:
    """`config` with `full` in each `every`-th layer and `sliding` in the others, or as `layer_types` says."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    numbers = range(1, config.num_layers + 1)
    pattern = ["sliding_attention" if number % every else "full_attention" for number in numbers]
    return replace(config, layers=tuple(kinds[kind] for kind in _layer_types(keys, pattern)))


def _alike(config: DecoderConfig, layer: LayerConfig) -> DecoderConfig:
    return replace(config, layers=(layer,) * config.num_layers)


def _refuse_layer_types(keys: Keys) -> None:
    # transformers applies other lists only in part, differently in each family and attention backend.
    all_full = ["full_attention"] * keys.integer("num_hidden_layers")
    given = keys.get("layer_types")
    if given is not None and (given != all_full or keys.get("sliding_window") is not None):
        family = keys.text("model_type")
        raise keys.error("layer_types", f"not part of the {family} family, whose layers are alike")


def _llama_like(keys: Keys, *, activation_key: str = "hidden_act") -> DecoderConfig:
    """The settings that all families share: those of Llama without rope, windows and biases."""
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
        qkv_bias=_bias(keys, "attention_bias", "use_bias"),
        output_bias=_bias(keys, "attention_out_bias", "attention_bias", "use_bias"),
        mlp_bias=_bias(keys, "mlp_bias", "use_bias"),
        notes=_notes(keys),
    )


def _bias(keys: Keys, *names: str) -> bool:
    """The first of `names` that is a key of the family decides."""
    declared = DEFAULTS[keys.text("model_type")]
    return next((keys.flag(name) for name in names if name in declared), False)


def _notes(keys: Keys) -> tuple[str, ...]:
    # Published checkpoints have them: Granite 3, Seed-OSS. Fine-tuning works without dropout.
    names = ("attention_dropout", "residual_dropout")
    return tuple(
        f"{name} {keys.get(name)} is not applied: lptune trains without dropout"
        for name in names
        if keys.get(name)
    )


def _llama(keys: Keys, **rope: Any) -> DecoderConfig:
    """rope: arguments of `read_rope`."""
    config = _llama_like(keys)
    _refuse_layer_types(keys)
    keys.optional_integer("sliding_window")  # without effect here, but a length for transformers' cache
    return _alike(config, LayerConfig(rope=read_rope(keys, head_dim=config.head_dim, **rope)))


def _mistral(keys: Keys) -> DecoderConfig:
    config = _llama(keys)
    return _alike(config, replace(config.layers[0], window=keys.optional_integer("sliding_window")))


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "attention_factor": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(keys: Keys) -> DecoderConfig:
    if keys.get("rope_parameters") is None:
        given = {**keys.given, "rope_parameters": _MINISTRAL3_ROPE}
        keys = Keys(given, DEFAULTS["ministral3"], keys.where)
    config = _mistral(keys)
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    settings = Keys(keys.get(name) or {}, {}, f"{keys.where}: {name}")
    rope = config.layers[0].rope
    assert rope is not None
    rope = replace(
        rope,
        query_growth=settings.number("llama_4_scaling_beta"),
        original_max_position_embeddings=rope.original_max_position_embeddings
        or settings.integer("original_max_position_embeddings"),
    )
    return _alike(config, replace(config.layers[0], rope=rope))


def _hunyuan(keys: Keys) -> DecoderConfig:
    if keys.get("head_dim") is None:
        raise keys.error("head_dim", "missing; hunyuan_v1_dense needs it")
    kinds = {kind: kind for kind in ROPE_KINDS} | {"dynamic": "alpha"}
    return replace(_llama(keys, kinds=kinds), qk_norm="rotated")


def _ernie(keys: Keys) -> DecoderConfig:
    return _llama(keys, default_theta=500_000.0, interleaved=True)


def _exaone4(keys: Keys) -> DecoderConfig:
    config, types = _llama_like(keys), keys.get("layer_types")
    needs_window = types is None or (isinstance(types, list) and "sliding_attention" in types)
    window = _window(keys) if needs_window else keys.optional_integer("sliding_window")
    rope = read_rope(keys, head_dim=config.head_dim)
    config = _alternating(
        keys,
        config,
        every=keys.integer("sliding_window_pattern") if types is None else 1,
        full=LayerConfig(rope=rope if window is None else None),
        sliding=LayerConfig(window=window, rope=rope),
    )
    return replace(config, norm_placement="post", qk_norm="head")


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
    config = _qwen2(keys)
    return replace(config, qkv_bias=config.output_bias, qk_norm="head")


def _gemma(keys: Keys) -> DecoderConfig:
    config = _llama(keys)
    return replace(
        config,
        # As in transformers: the first checkpoints have the wrong name.
        activation="gelu_pytorch_tanh" if config.activation == "gelu" else config.activation,
        embedding_scale=config.hidden_size**0.5,
        norm_adds_one=True,
    )


def _gemma_2_or_3(keys: Keys) -> DecoderConfig:
    """The settings that Gemma 2 and Gemma 3 share, without `layers`."""
    config = _llama_like(keys, activation_key="hidden_activation")
    return replace(
        config,
        attention_scale=keys.integer("query_pre_attn_scalar") ** -0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5,
        norm_placement="both",
        norm_adds_one=True,
    )


def _gemma2(keys: Keys) -> DecoderConfig:
    config = _gemma_2_or_3(keys)
    full = LayerConfig(rope=read_rope(keys, head_dim=config.head_dim))
    config = _alternating(keys, config, every=2, full=full, sliding=replace(full, window=_window(keys)))
    return replace(config, attention_softcap=keys.optional_number("attn_logit_softcapping"))


def _gemma3(keys: Keys) -> DecoderConfig:
    config = _gemma_2_or_3(keys)
    keys.refuse(
        "attn_logit_softcapping",
        "not part of the gemma3_text family (transformers ignores it); set it to null",
    )
    local_theta = keys.given.get("rope_local_base_freq", 10_000.0)
    every = keys.integer("sliding_window_pattern") if "sliding_window_pattern" in keys.given else 6
    config = _with_rope_per_kind(keys, config, every, global_theta=1_000_000.0, local_theta=local_theta)
    return replace(config, qk_norm="head")


def _with_rope_per_kind(
    keys: Keys, config: DecoderConfig, every: int, *, global_theta: float, local_theta: Any
) -> DecoderConfig:
    """`_alternating` layers, each kind with a rope of its own. Thetas: for settings without rope_theta."""
    ropes = read_rope_per_layer_type(
        keys, head_dim=config.head_dim, global_theta=global_theta, local_theta=local_theta
    )
    full = LayerConfig(rope=ropes["full_attention"])
    sliding = LayerConfig(window=_window(keys), rope=ropes["sliding_attention"])
    return _alternating(keys, config, every=every, full=full, sliding=sliding)


def _phi3(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    _refuse_layer_types(keys)
    # Early Phi-3 files call longrope "su". Here transformers reads "yarn" as longrope too, and no other.
    rope = read_rope(
        keys,
        head_dim=config.head_dim,
        kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
        partial=True,
    )
    if rope.kind == "longrope" and config.head_dim != config.hidden_size // config.num_heads:
        raise keys.error("head_dim", "of longrope it must be hidden_size / num_attention_heads in phi3")
    layer = LayerConfig(window=keys.optional_integer("sliding_window"), rope=rope)
    return replace(_alike(config, layer), fused_projections=True)


def _olmo2(keys: Keys) -> DecoderConfig:
    return replace(_llama(keys), norm_placement="post", qk_norm="full")


def _olmo3(keys: Keys) -> DecoderConfig:
    # An outer rope_theta is that of layers with full attention alone, as in transformers.
    theta = 500_000.0
    config = _with_rope_per_kind(keys, _llama_like(keys), 4, global_theta=theta, local_theta=theta)
    return replace(config, norm_placement="post", qk_norm="full")


def _smollm3(keys: Keys) -> DecoderConfig:
    config = _llama_like(keys)
    rope = read_rope(keys, head_dim=config.head_dim, default_theta=2_000_000.0)
    every = keys.integer("no_rope_layer_interval")
    uses_rope = keys.get("no_rope_layers")
    if uses_rope is None:
        uses_rope = [int((i + 1) % every != 0) for i in range(config.num_layers)]
    is_list = isinstance(uses_rope, list) and all(type(entry) is int for entry in uses_rope)
    if not is_list or len(uses_rope) < config.num_layers:
        raise keys.error(
            "no_rope_layers", f"expected a list of {config.num_layers} entries, 1 for rope, 0 for none"
        )
    sliding = keys.flag("use_sliding_window")
    has_window = sliding and keys.get("sliding_window") is not None
    pattern = [
        "sliding_attention" if has_window and not rope_on else "full_attention" for rope_on in uses_rope
    ]
    types = _layer_types(keys, pattern[: config.num_layers])
    if "sliding_attention" in types and not sliding:
        # Some attention backends of transformers apply the window then, others do not.
        raise keys.error("layer_types", "sliding_attention contradicts use_sliding_window: false")
    layers = tuple(
        LayerConfig(
            window=_window(keys) if kind == "sliding_attention" else None,
            rope=rope if rope_on else None,
        )
        for kind, rope_on in zip(types, uses_rope, strict=False)
    )
    return replace(config, layers=layers)


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
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "smollm3": _smollm3,
    "granite": _granite,
    "seed_oss": _llama,
    "hunyuan_v1_dense": _hunyuan,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
}
"""By `model_type`: the function that reads its config.json."""


def _check_supported(keys: Keys) -> str:
    """The family. Raises UserError for each setting that a dense text decoder does not support."""
    family = keys.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(family, str):
        raise keys.error("model_type", f"missing; expected one of {supported}")
    if keys.get("vision_config") is not None or family == "gemma3":
        raise keys.error(
            "model_type", f"{family!r} is multimodal; only text decoders can be trained ({supported})"
        )
    if family not in FAMILIES:
        # Do not suggest a similar name: programs write config.json, and qwen3_moe is no misspelt qwen3.
        raise keys.error(
            "model_type", f"{family!r} is neither one of {supported} nor a causal model that transformers has"
        )
    read_scheme(keys)
    keys.check_architectures()
    for key in ("resid_pdrop", "embd_pdrop", "hidden_dropout"):
        keys.refuse(key, f"dropout is not supported, found {keys.get(key)}; set it to 0.0")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        keys.refuse(key, "mixtures of experts are not supported; choose a dense checkpoint")
    keys.refuse("use_bidirectional_attention", "only causal attention is supported")
    keys.refuse("is_encoder_decoder", "only decoders are supported")
    if not keys.given.get("is_causal", True):
        raise keys.error("is_causal", f"only causal attention is supported, found {keys.get('is_causal')}")
    for key, what in _ELSEWHERE.items():
        if keys.get(key) is not None:
            raise keys.error(key, f"{what} not supported; take the key out")
    if "configuration_files" in keys.given:
        raise keys.error("configuration_files", "other files with settings are not read; take the key out")
    for key in ("dtype", "torch_dtype"):
        if keys.get(key) not in (None, *_DTYPES):
            raise keys.error(key, f"expected one of {', '.join(_DTYPES)}, found {keys.get(key)!r}")
    return family


def _check_pad_token(keys: Keys, vocab_size: int) -> None:
    # transformers cannot build its embedding then, even if the value is only a default.
    pad = keys.get("pad_token_id")
    if pad is not None and not -vocab_size <= pad < vocab_size:
        missing = "" if "pad_token_id" in keys.given else "missing, which means "
        raise keys.error(
            "pad_token_id", f"{missing}{pad}, outside of the vocabulary of {vocab_size}; set it to null"
        )


def config_from_keys(keys: Keys) -> DecoderConfig:
    """The DecoderConfig of a config.json. Raises UserError, one line, for an unsupported or wrong setting."""
    family = _check_supported(keys)
    keys = keys.with_defaults(DEFAULTS[family])
    config = FAMILIES[family](keys)
    check_types(keys, family)
    _check_pad_token(keys, config.vocab_size)
    return config


def config_from_dict(content: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The DecoderConfig of the content of a config.json, for example of a preset. where: names it in errors.
    Raises UserError as `config_from_keys` does.
    """
    return config_from_keys(Keys(content, {}, where))
