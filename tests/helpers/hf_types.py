"""Small models of the causal model types of transformers, made by transformers itself."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_ROUTED = _EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_WINDOWS: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}

TYPES: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS
    | _WINDOWS
    | {"num_shared_experts": 1, "num_dense_layers": 1, "n_group": 1, "topk_group": 1, "num_experts": 8},
    "apertus": {},
    "cohere2": _WINDOWS,
    "deepseek_v3": _ROUTED | _LATENT,
    "diffllama": {},
    "ernie4_5_moe": _EXPERTS
    | {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma4_text": _WINDOWS
    | {
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text": _WINDOWS | {"global_head_dim": 32},
    "glm4": {},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _ROUTED | _LATENT | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "gpt_oss": _WINDOWS | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": _MAMBA
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba"] * 3 + ["attention"],
    },
    "kimi_linear": _ROUTED
    | _LATENT
    | {
        "q_lora_rank": None,
        "num_shared_experts": 1,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    },
    "lfm2_moe": _EXPERTS
    | {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "num_dense_layers": 1,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 1,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "nemotron_h": _ROUTED
    | {
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
    },
    "olmo_hybrid": _DELTA_NET,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 32},
}
"""By `model_type`, those that our own decoder does not build: what differs from _COMMON."""

NATIVE: dict[str, dict[str, Any]] = {
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "gemma": {},
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "granite": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral3": {},
    "mistral": {"sliding_window": 16},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {},
}
"""Those that our own decoder builds."""

ALL = TYPES | NATIVE


def config(kind: str, **more: Any) -> Any:
    """transformers' config of a small model of this type."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    own = ALL.get(kind, {}) | more
    known = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", {})}
    known |= {*getattr(cls, "attribute_map", {}), *own}
    values = _COMMON | own
    values["vocab_size_per_layer_input"] = values["vocab_size"]
    return cls(**{key: value for key, value in values.items() if key in known})


def causal(kind: str, **more: Any) -> Any:
    """A model of this type by transformers, in float32, with its own eager attention and large weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, **more), attn_implementation="eager").float().eval()
    fill(model)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights with which attention and experts matter, and constants that are not 0."""
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.15, generator=draw)
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and "bias" in name:
            buffer.normal_(0.0, 0.02, generator=draw)


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """Puts the model's weights and config into a folder that has a tokenizer."""
    for file in (*folder.glob("*.safetensors"), folder / "config.json"):
        file.unlink()
    model.save_pretrained(folder)
    return folder


def vocab_size(folder: Path) -> int:
    """Of the model in `folder`."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
