"""Causal language models that are built from config.json (backbone.py): our decoder, for all its families.

    facts = read_config(folder)           # Facts; UserError for a setting that is not supported
    model = build_on_meta(facts)          # Backbone
    loss_sum = model(tokens_BS, DocumentBounds(...), labels_BS)
    log_p_BS = model(tokens_BS, DocumentBounds(...), labels_BS, loss=log_probabilities)

Models do not know of precision and sharding, only of rows that ranks share (context.py). Names that need
torch are imported at their first use, so that reading configs and presets does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from lptune.models.config import DecoderConfig
from lptune.models.facts import Facts, Layer
from lptune.models.families import FAMILIES, config_from_dict
from lptune.models.headers import HFIndex, is_of_run, read_index
from lptune.models.members import facts_of_preset, read_config
from lptune.models.presets import HF_PRESETS, PRESETS, preset_names

if TYPE_CHECKING:
    from lptune.models.backbone import Backbone, Part, aliases, build_on_meta, num_parameters, tie
    from lptune.models.cache import KVCache
    from lptune.models.context import Group, part, summed
    from lptune.models.decoder import Decoder, RMSNorm
    from lptune.models.documents import DocumentBounds
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
    "HF_PRESETS",
    "IGNORE_INDEX",
    "PRESETS",
    "Backbone",
    "Decoder",
    "DecoderConfig",
    "Divergence",
    "DocumentBounds",
    "Facts",
    "Group",
    "HFIndex",
    "KVCache",
    "Layer",
    "Objective",
    "Part",
    "RMSNorm",
    "TopKDivergence",
    "WeightedSum",
    "Words",
    "aliases",
    "build_on_meta",
    "config_from_dict",
    "facts_of_preset",
    "freeze",
    "is_of_run",
    "log_probabilities",
    "num_parameters",
    "part",
    "preset_names",
    "read_config",
    "read_index",
    "summed",
    "summed_cross_entropy",
    "tie",
]

_LAZY = {
    "backbone": ("Backbone", "Part", "aliases", "build_on_meta", "num_parameters", "tie"),
    "cache": ("KVCache",),
    "context": ("Group", "part", "summed"),
    "decoder": ("Decoder", "RMSNorm"),
    "documents": ("DocumentBounds",),
    "frozen": ("freeze",),
    "loss": (
        *("IGNORE_INDEX", "Divergence", "Objective", "TopKDivergence", "WeightedSum"),
        *("log_probabilities", "summed_cross_entropy"),
    ),
    "words": ("Words",),
}


def __getattr__(name: str) -> object:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)  # noqa: TID251  (a constant table)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
