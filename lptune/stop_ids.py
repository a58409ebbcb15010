"""The tokens at which generation ends, as a model's folder names them.

transformers reads `eos_token_id` of generation_config.json, a number or a list, and config.json's only in
a folder without that file. lptune reads config.json's, too, if the file has no such key: a model whose
generation never ends is of no use.
"""

from pathlib import Path
from typing import Any

from lptune.base.files import read_object
from lptune.config import UserError

# What transformers 5 takes from config.json for a folder without generation_config.json, for decoders.
_GENERATION_KEYS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams", "max_length",
    "min_length", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
_FILES = ("generation_config.json", "config.json")


def read_stop_ids(folder: Path) -> list[int]:
    """The ids of `eos_token_id` in `folder`, in order; none if no file has any. Raises UserError for a file
    that is not a JSON object, and for values that are no ids.
    """
    return next(filter(None, (_ids(folder / name) for name in _FILES)), [])


def transformers_stop_ids(folder: Path) -> list[int]:
    """The ids at which transformers ends on `folder`: those of generation_config.json alone, if it exists."""
    return next((_ids(folder / name) for name in _FILES if (folder / name).is_file()), [])


def generation_config(folder: Path, stop_ids: list[int]) -> dict[str, Any]:
    """The content of generation_config.json with these `stop_ids`: that of `folder`, or, without one, what
    transformers makes of config.json. Raises UserError as `read_stop_ids` does.
    """
    content = _read(folder / "generation_config.json")
    if not (folder / "generation_config.json").is_file():
        of_model = _read(folder / "config.json")
        content = {key: of_model[key] for key in _GENERATION_KEYS if of_model.get(key) is not None}
    return {**content, "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0]}


def _ids(path: Path) -> list[int]:
    value = _read(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if any(type(each) not in (int, type(None)) for each in ids):
        raise UserError(f"{path}: eos_token_id: expected a token id or a list of them, found {value!r}")
    return [each for each in ids if each is not None]


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file."""
    return read_object(path, todo="copy it again", missing={})
