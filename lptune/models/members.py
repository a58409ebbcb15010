"""The members of Backbone: which of them a config.json asks for. Nothing else knows it; it imports no torch.

A member is a function that reads config.json as facts, whose `build` makes its model. To add one, write both
(backbone.py says what the model needs) and put the function into MEMBERS. It imports what is slow to import
when it is called.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.models.facts import Facts
from lptune.models.families import FAMILIES, config_from_keys
from lptune.models.headers import read_index
from lptune.models.keys import Keys
from lptune.models.presets import find_preset
from lptune.models.quantized import QUANTIZED_KEYS

_WORDS = re.compile(r"((?:model\.)?language_model\.(?:model\.)?)embed_tokens\.weight")


def _decoder(keys: Keys, folder: Path) -> Facts | None:
    if isinstance(text := keys.get("text_config"), dict):
        return _text_part(keys, text, folder)
    family = keys.get("model_type")
    return config_from_keys(keys) if isinstance(family, str) and family in FAMILIES else None


def _text_part(keys: Keys, text: dict[str, Any], folder: Path) -> Facts | None:
    """The text part of a folder whose model also sees or hears; None: transformers decides."""
    if text.get("model_type") not in FAMILIES or any(keys.get(key) is not None for key in QUANTIZED_KEYS):
        return None
    stored = read_index(folder).tensors if any(folder.glob("*.safetensors")) else {}
    prefix = next((found[1] for name in stored if (found := _WORDS.fullmatch(name))), None)
    if prefix is None:
        return None
    head = next((name for name in stored if name.endswith("lm_head.weight")), None)
    # What the whole model says wins over what the part says, as in transformers.
    ties = keys.get("tie_word_embeddings")
    tied = head is None or bool(text.get("tie_word_embeddings") if ties is None else ties)
    try:
        config = config_from_keys(Keys({**text, "tie_word_embeddings": tied}, {}, keys.where))
    except UserError:  # a setting that is not ours
        return None
    words = (f"{prefix}embed_tokens.weight", head or "lm_head.weight")
    return replace(config, prefixes=(prefix, words[1].removesuffix("weight")), word_names=words)


def _transformers(keys: Keys, folder: Path) -> Facts | None:
    from lptune.models.hf.facts import read  # imports transformers

    return read(keys, folder)


MEMBERS: dict[str, Callable[[Keys, Path], Facts | None]] = {
    "decoder": _decoder,
    "transformers": _transformers,
}
"""By name, in the order in which they are asked: reads the config.json of a folder; None: not its own."""


def read_config(folder: Path, backend: str = "auto") -> Facts:
    """The facts of the Hugging Face folder `folder`. backend: the key `model.backend`.

    Raises UserError, one line, for a missing or broken config.json, an unknown family, a quantized or
    multimodal checkpoint, and every setting that this library does not support exactly.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not found; expected the folder of a Hugging Face checkpoint")
    return _facts(Keys.from_file(folder / "config.json"), folder, backend)


def facts_of_preset(name: str, backend: str = "auto") -> Facts:
    """The facts of the preset FAMILY/SIZE, one of `preset_names`. backend: the key `model.backend`."""
    return _facts(Keys(find_preset(name), {}, f"preset {name}"), Path(f"preset {name}"), backend)


def _facts(keys: Keys, folder: Path, backend: str) -> Facts:
    for name, read in MEMBERS.items():
        asked = backend == "auto" or (name == "transformers") == (backend == "transformers")
        if asked and (facts := read(keys, folder)) is not None:
            return facts
    if backend == "transformers":
        family = keys.get("model_type")
        raise keys.error("model_type", f"transformers has no causal language model {family!r}")
    return config_from_keys(keys)  # raises: says which families there are
