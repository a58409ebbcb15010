"""The tokens at which generation ends, as a model's folder names them.

transformers and vLLM read `eos_token_id` of generation_config.json, a number or a list. A folder without that
file, or a file without that key, leaves it to config.json.
"""

from pathlib import Path
from typing import Any

from lptune.base.files import read_object
from lptune.config import UserError

# What transformers 5 takes from config.json for a folder without generation_config.json, for decoders.
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")


def read_stop_ids(folder: Path) -> list[int]:
    """The ids of `eos_token_id` in `folder`, in order; none if no file has any. Raises UserError for a file
    that is not a JSON object, and for values that are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if any(type(each) not in (int, type(None)) for each in ids):
            raise UserError(
                f"{folder / name}: eos_token_id: expected a token id or a list of them, found {value!r}"
            )
        if value is not None:
            return [each for each in ids if each is not None]
    return []


def generation_config(folder: Path, stop_ids: list[int]) -> dict[str, Any]:
    """The content of generation_config.json with these `stop_ids`: that of `folder`, or, without one, what
    transformers makes of config.json. Raises UserError as `read_stop_ids` does.
    """
    content = _read(folder / "generation_config.json")
    if not content:
        of_model = _read(folder / "config.json")
        content = {key: of_model[key] for key in _GENERATION_KEYS if of_model.get(key) is not None}
    return {**content, "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0]}


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file."""
    return read_object(path, todo="copy it again", missing={})
