"""The config.json of each family and size, for making a new checkpoint with random weights.

The real sizes are the published configurations. `tiny` (at most 200,000 parameters, every dimension a
multiple of 16) has all features of its family: windows shorter than the rows of a test, both kinds of layers,
the kind of rope, head sizes that differ from hidden size / heads. Tests and trial runs use it.

PRESETS[family][size] is a dict, of families that our decoder builds. HF_PRESETS has those that transformers'
code builds, with their number of weights, since to count them takes transformers and seconds. `preset_names`
and `find_preset` look into both. The bos, eos and pad ids are null, and the code that makes the tokenizer
fills them in. Without these keys transformers would use the published ids, which a small vocabulary does not
have. This file imports no torch.
"""

import functools
from typing import Any, NamedTuple

from lptune.models.defaults import BIASES, Dims

Preset = dict[str, Any]


def _preset(
    family: str, architecture: str, dims: Dims, *, max_len: int, eps: float, tied: bool, **more: Any
) -> Preset:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        **dims.keys(max_len=max_len, eps=eps, tied=tied),
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "bfloat16",
        **more,
    }


def _tiny_dims(layers: int = 2, heads: int = 4, kv_heads: int = 2) -> Dims:
    return Dims(vocab=256, hidden=64, mlp=128, layers=layers, heads=heads, kv_heads=kv_heads)


def _tiny(family: str, architecture: str, layers: int = 2, **more: Any) -> dict[str, Preset]:
    """The sizes of a family that has no config."""
    more = {"max_len": 512, "eps": 1e-5, "tied": True, **more}
    return {"tiny": _preset(family, architecture, _tiny_dims(layers), **more)}


def _llama(dims: Dims, *, factor: float, original_len: int = 8192, **more: Any) -> Preset:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_len,
    }
    common: Preset = BIASES | {"max_len": 131072, "eps": 1e-5, "hidden_act": "silu", "rope_theta": 500_000.0}
    return _preset("llama", "Llama", dims, **{**common, "rope_scaling": rope, **more})


def _qwen(family: str, architecture: str, dims: Dims, **more: Any) -> Preset:
    common: Preset = {
        "use_sliding_window": False, "max_window_layers": dims.layers, "sliding_window": None, "eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return _preset(family, architecture, dims, **{**common, **more})


_qwen2 = functools.partial(_qwen, "qwen2", "Qwen2", max_len=131072, sliding_window=131072)
_qwen3 = functools.partial(_qwen, "qwen3", "Qwen3", max_len=40960, attention_bias=False, head_dim=128)
_mistral = functools.partial(
    _preset, "mistral", "Mistral", max_len=32768, eps=1e-5, tied=False, hidden_act="silu"
)
_gemma2 = functools.partial(
    _preset, "gemma2", "Gemma2", max_len=8192, eps=1e-6, tied=True, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh", attention_bias=False, rope_theta=10_000.0,
    final_logit_softcapping=30.0, attn_logit_softcapping=50.0, head_dim=256, sliding_window=4096,
    query_pre_attn_scalar=256,
)  # fmt: skip
_gemma3 = functools.partial(
    _preset, "gemma3_text", "Gemma3", max_len=32768, eps=1e-6, tied=True,
    hidden_activation="gelu_pytorch_tanh", attention_bias=False, rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0, rope_scaling=None, head_dim=256, sliding_window=512,
    sliding_window_pattern=6, query_pre_attn_scalar=256,
)  # fmt: skip
_phi = functools.partial(
    _preset, "phi3", "Phi3", eps=1e-5, hidden_act="silu", resid_pdrop=0.0, embd_pdrop=0.0
)


def _longrope(short_factor: list[float], long_factor: list[float]) -> Preset:
    return {"type": "longrope", "short_factor": short_factor, "long_factor": long_factor}


_olmo2 = functools.partial(
    _preset, "olmo2", "Olmo2", max_len=4096, eps=1e-6, tied=False, hidden_act="silu", attention_bias=False,
    rope_theta=500_000.0, rope_scaling=None,
)  # fmt: skip
_smollm3 = functools.partial(
    _preset, "smollm3", "SmolLM3", attention_bias=False, mlp_bias=False, max_len=65536, eps=1e-6, tied=True,
    hidden_act="silu", rope_scaling=None, no_rope_layer_interval=4, use_sliding_window=False,
    sliding_window=None, rope_theta=5_000_000.0,
)  # fmt: skip
_granite = functools.partial(
    _preset, "granite", "Granite", attention_bias=False, mlp_bias=False, max_len=131072, eps=1e-5, tied=True,
    hidden_act="silu", rope_scaling=None, embedding_multiplier=12.0, logits_scaling=8.0,
    residual_multiplier=0.22, rope_theta=5_000_000.0,
)  # fmt: skip


def _yarn(factor: float, original_max_len: int, **more: Any) -> Preset:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **more,
        "original_max_position_embeddings": original_max_len,
    }


def _olmo3(dims: Dims, **more: Any) -> Preset:
    # allenai/Olmo-3-1025-7B, allenai/Olmo-3-1125-32B
    rope = _yarn(8.0, 8192, attention_factor=1.2079441541679836)
    common: Preset = {
        "max_len": 65536,
        "eps": 1e-6,
        "tied": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (dims.layers // 4),
    }
    return _preset("olmo3", "Olmo3", dims, **{**common, **more}, rope_theta=500_000.0, rope_scaling=rope)


def _ministral3(dims: Dims, original_len: int = 16384, **more: Any) -> Preset:
    # the text part of mistralai/Ministral-3-3B-Base-2512 and -8B-Base-2512
    more_of_rope = {"rope_theta": 1_000_000.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = _yarn(16.0, original_len, llama_4_scaling_beta=0.1, **more_of_rope)
    common: Preset = {"max_len": 262144, "eps": 1e-5, "hidden_act": "silu", "head_dim": 128}
    more = {**common, **more}
    return _preset("ministral3", "Ministral3", dims, rope_parameters=rope, sliding_window=None, **more)


_PHI4_MINI_LONG_FACTOR = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533,
    5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
    14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03,
    32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16,
    47.77,
]  # fmt: skip

# Dims: vocabulary, hidden, MLP, layers, query heads, key heads
PRESETS: dict[str, dict[str, Preset]] = {
    "llama3_2": {
        "tiny": _llama(_tiny_dims(), factor=32.0, original_len=64, max_len=512, head_dim=16, tied=True),
        # Large enough to learn the built-in instructions in minutes. 0.08 is about 1 / sqrt(hidden); with the
        # usual 0.02 such a small model learns too slowly at first.
        "quickstart": _llama(
            Dims(1024, 128, 384, 2, 8, 4),
            factor=32.0,
            max_len=512,
            head_dim=16,
            tied=True,
            initializer_range=0.08,
        ),
        "1b": _llama(Dims(128256, 2048, 8192, 16, 32, 8), factor=32.0, head_dim=64, tied=True),
        "3b": _llama(Dims(128256, 3072, 8192, 28, 24, 8), factor=32.0, head_dim=128, tied=True),
    },
    "llama3_1": {
        "tiny": _llama(_tiny_dims(), factor=8.0, original_len=64, max_len=512, head_dim=32, tied=False),
        "8b": _llama(Dims(128256, 4096, 14336, 32, 32, 8), factor=8.0, head_dim=128, tied=False),
        "70b": _llama(Dims(128256, 8192, 28672, 80, 64, 8), factor=8.0, head_dim=128, tied=False),
    },
    "llama3_3": {
        "tiny": _llama(_tiny_dims(), factor=8.0, original_len=64, max_len=512, head_dim=32, tied=False),
        "70b": _llama(Dims(128256, 8192, 28672, 80, 64, 8), factor=8.0, head_dim=128, tied=False),
    },
    "qwen2_5": {
        "tiny": _qwen2(
            _tiny_dims(),
            max_len=512,
            tied=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
        "0.5b": _qwen2(Dims(151936, 896, 4864, 24, 14, 2), max_len=32768, sliding_window=32768, tied=True),
        "1.5b": _qwen2(Dims(151936, 1536, 8960, 28, 12, 2), tied=True),
        "3b": _qwen2(Dims(151936, 2048, 11008, 36, 16, 2), max_len=32768, sliding_window=32768, tied=True),
        "7b": _qwen2(Dims(152064, 3584, 18944, 28, 28, 4), tied=False),
        "14b": _qwen2(Dims(152064, 5120, 13824, 48, 40, 8), eps=1e-5, tied=False),
        "32b": _qwen2(Dims(152064, 5120, 27648, 64, 40, 8), eps=1e-5, tied=False),
    },
    "qwen3": {
        "tiny": _qwen3(_tiny_dims(), max_len=512, head_dim=32, tied=True),
        "0.6b": _qwen3(Dims(151936, 1024, 3072, 28, 16, 8), tied=True),
        "1.7b": _qwen3(Dims(151936, 2048, 6144, 28, 16, 8), tied=True),
        "4b": _qwen3(Dims(151936, 2560, 9728, 36, 32, 8), tied=True),
        "8b": _qwen3(Dims(151936, 4096, 12288, 36, 32, 8), tied=False),
        "14b": _qwen3(Dims(151936, 5120, 17408, 40, 40, 8), tied=False),
        "32b": _qwen3(Dims(151936, 5120, 25600, 64, 64, 8), tied=False),
    },
    "mistral": {
        "tiny": _mistral(_tiny_dims(), head_dim=32, rope_theta=10_000.0, sliding_window=16),
        "7b": _mistral(  # v0.3
            Dims(32768, 4096, 14336, 32, 32, 8), head_dim=128, rope_theta=1_000_000.0, sliding_window=None
        ),
    },
    "ministral3": {
        "tiny": _ministral3(_tiny_dims(), original_len=16, max_len=256, tied=True, head_dim=16),
        "3b": _ministral3(Dims(131072, 3072, 9216, 26, 32, 8), tied=True),
        "8b": _ministral3(Dims(131072, 4096, 14336, 34, 32, 8), tied=False),
    },
    "gemma": _tiny("gemma", "Gemma", hidden_act="gelu", head_dim=32),
    "gemma2": {
        "tiny": _gemma2(_tiny_dims(), max_len=512, head_dim=32, sliding_window=16, query_pre_attn_scalar=24),
        "2b": _gemma2(Dims(256000, 2304, 9216, 26, 8, 4)),
        "9b": _gemma2(Dims(256000, 3584, 14336, 42, 16, 8)),
    },
    "gemma3": {
        "tiny": _gemma3(
            _tiny_dims(layers=3),
            max_len=512,
            head_dim=32,
            sliding_window=16,
            sliding_window_pattern=3,
            query_pre_attn_scalar=24,
        ),
        "270m": _gemma3(Dims(262144, 640, 2048, 18, 4, 1)),
        "1b": _gemma3(Dims(262144, 1152, 6912, 26, 4, 1)),
    },
    "phi4": {
        "tiny": _phi(
            _tiny_dims(heads=2, kv_heads=1),
            max_len=512,
            tied=True,
            partial_rotary_factor=0.75,
            rope_theta=10_000.0,
            rope_scaling=_longrope([1.0 + i / 16 for i in range(12)], [1.0 + i for i in range(12)]),
            original_max_position_embeddings=32,
            sliding_window=None,
        ),
        "mini": _phi(
            Dims(200064, 3072, 8192, 32, 24, 8),
            max_len=131072,
            tied=True,
            partial_rotary_factor=0.75,
            rope_theta=10_000.0,
            rope_scaling=_longrope([1.0] * 48, _PHI4_MINI_LONG_FACTOR),
            original_max_position_embeddings=4096,
            sliding_window=262144,
        ),
        "14b": _phi(
            Dims(100352, 5120, 17920, 40, 40, 10),
            max_len=16384,
            tied=False,
            rope_theta=250_000.0,
            rope_scaling=None,
            original_max_position_embeddings=16384,
            sliding_window=None,
        ),
    },
    "olmo2": {
        "tiny": _olmo2(_tiny_dims()),
        "7b": _olmo2(Dims(100352, 4096, 11008, 32, 32, 32)),
    },
    "olmo3": {
        "tiny": _olmo3(_tiny_dims(layers=4), sliding_window=16),
        "7b": _olmo3(Dims(100278, 4096, 11008, 32, 32, 32)),
        "32b": _olmo3(Dims(100278, 5120, 27648, 64, 40, 8)),
    },
    "smollm3": {
        "tiny": _smollm3(_tiny_dims(layers=4)),
        "3b": _smollm3(Dims(128256, 2048, 11008, 36, 16, 4)),
    },
    "granite3": {
        "tiny": _granite(_tiny_dims(), attention_multiplier=0.1),
        "2b": _granite(Dims(49155, 2048, 8192, 40, 32, 8), attention_multiplier=0.015625),  # 3.1
    },
    "seed_oss": _tiny(
        "seed_oss", "SeedOss", tied=False, head_dim=32, rope_theta=10_000_000.0, residual_dropout=0.0
    ),
    "hunyuan": _tiny(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        head_dim=32,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "ernie4_5": _tiny("ernie4_5", "Ernie4_5", head_dim=32, use_bias=True),
    "exaone4": _tiny("exaone4", "Exaone4", layers=4, tied=False, sliding_window=16),
}
"""The content of config.json by family and size. The names are those of the configs folder."""


class HFPreset(NamedTuple):
    """A preset of a family that transformers' code builds."""

    content: Preset
    """Of config.json."""
    num_weights: int


# The sizes are those of the published config.json; those of the text part where the model also sees.


_qwen3_moe = functools.partial(  # Qwen/Qwen3-30B-A3B
    _preset, "qwen3_moe", "Qwen3Moe", rope_theta=1_000_000.0, attention_bias=False, max_len=40960, eps=1e-6,
    tied=False, hidden_act="silu", head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    router_aux_loss_coef=0.001,
)  # fmt: skip
# zai-org/GLM-4.5-Air. Its block for further tokens is not trained (it passes on), and not counted.
_glm4_moe = functools.partial(
    _preset, "glm4_moe", "Glm4Moe", max_len=131072, eps=1e-5, tied=False, hidden_act="silu",
    attention_bias=True, use_qk_norm=False, head_dim=128, partial_rotary_factor=0.5, rope_theta=1_000_000.0,
    rope_scaling=None, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
    moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=1.0, num_nextn_predict_layers=1,
)  # fmt: skip


def _gpt_oss(dims: Dims, **more: Any) -> Preset:
    # openai/gpt-oss-20b, without its quantization_config
    rope = _yarn(32.0, 4096, truncate=False)
    common: Preset = {
        "max_len": 131072,
        "eps": 1e-5,
        "tied": False,
        "hidden_act": "silu",
        "attention_bias": True,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
        "rope_theta": 150_000.0,
        "rope_scaling": rope,
        "layer_types": ["sliding_attention", "full_attention"] * (dims.layers // 2),
    }
    return _preset("gpt_oss", "GptOss", dims, **{**common, **more})


def _qwen3_5(dims: Dims, *, value_heads: int, **more: Any) -> Preset:
    # the text part of Qwen/Qwen3.5-0.8B-Base
    rope = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    common: Preset = {"max_len": 262144, "eps": 1e-6, "head_dim": 256, "rope_parameters": rope}
    more = {"linear_num_value_heads": value_heads, **common, **more}
    return _preset("qwen3_5_text", "Qwen3_5", dims, **more)


def _gemma4(dims: Dims, full_kv_heads: int | None = None, **more: Any) -> Preset:
    # the text part of google/gemma-4-E2B, -E4B, -12B, -26B-A4B and -31B
    common: Preset = {
        "max_len": 262144,
        "eps": 1e-6,
        "tied": True,
        "final_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": full_kv_heads,
    }
    return _preset("gemma4_text", "Gemma4", dims, **{**common, **more})


_EDGE: Preset = {
    "max_len": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
}
"""Gemma 4 E2B and E4B: a layer has an embedding of its own, and the last layers read the keys of others."""
_FEW_EXPERTS: Preset = {"num_experts_per_tok": 2, "head_dim": 16, "max_len": 512}

HF_PRESETS: dict[str, dict[str, HFPreset]] = {
    "qwen3_moe": {
        "tiny": HFPreset(
            _qwen3_moe(_tiny_dims(), num_experts=8, moe_intermediate_size=32, **_FEW_EXPERTS), 157_056
        ),
        "30b": HFPreset(_qwen3_moe(Dims(151936, 2048, 6144, 48, 32, 4)), 30_532_122_624),
    },
    "gpt_oss": {
        "tiny": HFPreset(
            _gpt_oss(_tiny_dims()._replace(mlp=32), num_local_experts=8, sliding_window=16, **_FEW_EXPERTS),
            159_448,
        ),
        "20b": HFPreset(_gpt_oss(Dims(201088, 2880, 2880, 24, 64, 8)), 20_914_757_184),
    },
    "qwen3_5": {
        "tiny": HFPreset(
            _qwen3_5(
                _tiny_dims(layers=4)._replace(mlp=96),
                value_heads=4,
                tied=True,
                max_len=512,
                head_dim=32,
                linear_num_key_heads=2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
            ),
            175_816,
        ),
        "0.8b": HFPreset(
            _qwen3_5(Dims(248320, 1024, 3584, 24, 8, 2), value_heads=16, tied=True), 752_393_024
        ),
        "2b": HFPreset(
            _qwen3_5(Dims(248320, 2048, 6144, 24, 8, 2), value_heads=16, tied=True), 1_881_825_088
        ),
        "4b": HFPreset(
            _qwen3_5(Dims(248320, 2560, 9216, 32, 16, 4), value_heads=32, tied=True), 4_205_751_296
        ),
        "9b": HFPreset(
            _qwen3_5(Dims(248320, 4096, 12288, 32, 16, 4), value_heads=32, tied=False), 8_953_803_264
        ),
        "27b": HFPreset(
            _qwen3_5(Dims(248320, 5120, 17408, 64, 24, 4), value_heads=48, tied=False), 26_895_998_464
        ),
    },
    "gemma4": {
        "tiny": HFPreset(
            _gemma4(
                _tiny_dims(layers=4),
                1,
                layer_types=["sliding_attention", "full_attention"] * 2,
                max_len=512,
                head_dim=16,
                global_head_dim=32,
                sliding_window=16,
            ),
            177_408,
        ),
        "e2b": HFPreset(
            _gemma4(
                Dims(262144, 1536, 6144, 35, 8, 1), num_kv_shared_layers=20, use_double_wide_mlp=True, **_EDGE
            ),
            4_621_490_944,
        ),
        "e4b": HFPreset(
            _gemma4(Dims(262144, 2560, 10240, 42, 8, 2), num_kv_shared_layers=18, **_EDGE), 7_463_013_376
        ),
        "26b": HFPreset(
            _gemma4(
                Dims(262144, 2816, 2112, 30, 16, 8),
                2,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
            ),
            25_233_141_760,
        ),
        "12b": HFPreset(
            _gemma4(
                Dims(262144, 3840, 15360, 48, 16, 8),
                1,
                model_type="gemma4_unified_text",
                architectures=["Gemma4UnifiedForCausalLM"],
            ),
            11_907_350_272,
        ),
        "31b": HFPreset(_gemma4(Dims(262144, 5376, 21504, 60, 32, 16), 4), 30_697_345_280),
    },
    "glm4_moe": {
        "tiny": HFPreset(
            _glm4_moe(_tiny_dims(), n_routed_experts=8, moe_intermediate_size=32, **_FEW_EXPERTS), 138_304
        ),
        "air": HFPreset(_glm4_moe(Dims(151552, 4096, 10944, 46, 96, 8)), 106_852_245_504),
    },
}
"""As PRESETS, of families that transformers' code builds. The names are those of the configs folder."""


def preset_names() -> list[str]:
    """FAMILY/SIZE of all presets, those that our decoder builds first."""
    return [
        f"{family}/{size}"
        for presets in (PRESETS, HF_PRESETS)
        for family in presets
        for size in presets[family]
    ]


def find_preset(name: str) -> Preset:
    """The content of config.json of FAMILY/SIZE, one of `preset_names`."""
    family, _, size = name.partition("/")
    return dict(HF_PRESETS[family][size].content if family in HF_PRESETS else PRESETS[family][size])
