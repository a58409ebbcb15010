"""Decoders that are built from config.json: one implementation for all supported families.

    config = read_config(folder)          # DecoderConfig; UserError for a setting that is not supported
    model = build_on_meta(config)         # Decoder, parameters named as in the checkpoint
    loss_sum = model(tokens_BS, DocumentBounds(...), labels_BS)
    log_p_BS = model(tokens_BS, DocumentBounds(...), labels_BS, loss=log_probabilities)

Models do not know of precision and sharding. Names that need torch are imported at their first use, so that
reading configs and presets does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from lptune.models.config import DecoderConfig, LayerConfig, RopeConfig
from lptune.models.families import FAMILIES, config_from_dict, read_config
from lptune.models.headers import HFIndex, is_of_run, read_index
from lptune.models.presets import PRESETS

if TYPE_CHECKING:
    from lptune.models.attention import activate_attention
    from lptune.models.cache import KVCache, is_outgrown
    from lptune.models.decoder import Block, Decoder, RMSNorm, build_on_meta, num_parameters
    from lptune.models.documents import DocumentBounds
    from lptune.models.flops import attention_flops
    from lptune.models.frozen import freeze
    from lptune.models.loss import (
        IGNORE_INDEX,
        Divergence,
        Objective,
        TopKDivergence,
        WeightedSum,
        log_probabilities,
        summed_cross_entropy,
    )
    from lptune.models.words import Words

__all__ = [
    "FAMILIES",
    "IGNORE_INDEX",
    "PRESETS",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Divergence",
    "DocumentBounds",
    "HFIndex",
    "KVCache",
    "LayerConfig",
    "Objective",
    "RMSNorm",
    "RopeConfig",
    "TopKDivergence",
    "WeightedSum",
    "Words",
    "activate_attention",
    "attention_flops",
    "build_on_meta",
    "config_from_dict",
    "freeze",
    "is_of_run",
    "is_outgrown",
    "log_probabilities",
    "num_parameters",
    "read_config",
    "read_index",
    "summed_cross_entropy",
]

_LAZY = {
    "Block": "lptune.models.decoder",
    "Decoder": "lptune.models.decoder",
    "RMSNorm": "lptune.models.decoder",
    "build_on_meta": "lptune.models.decoder",
    "num_parameters": "lptune.models.decoder",
    "DocumentBounds": "lptune.models.documents",
    "IGNORE_INDEX": "lptune.models.loss",
    "activate_attention": "lptune.models.attention",
    "attention_flops": "lptune.models.flops",
    "freeze": "lptune.models.frozen",
    "Divergence": "lptune.models.loss",
    "KVCache": "lptune.models.cache",
    "Objective": "lptune.models.loss",
    "TopKDivergence": "lptune.models.loss",
    "WeightedSum": "lptune.models.loss",
    "is_outgrown": "lptune.models.cache",
    "log_probabilities": "lptune.models.loss",
    "summed_cross_entropy": "lptune.models.loss",
    "Words": "lptune.models.words",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
