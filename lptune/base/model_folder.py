"""A model's folder: that its files are its own, and the tokens at which generation ends.

transformers reads `eos_token_id` of generation_config.json, a number or a list, and config.json's only in
a folder without that file. lptune reads config.json's, too, if the file has no such key: a model whose
generation never ends is of no use.
"""

from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.base.files import kind_of, read_object

# What transformers 5 takes from config.json for a folder without generation_config.json, for decoders.
_GENERATION_KEYS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams", "max_length",
    "min_length", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
_HUB_REPOSITORIES = ("models--", "datasets--", "spaces--")
_FILES = ("generation_config.json", "config.json")


def check_model_folder(folder: Path, key: str = "model.path") -> None:
    """Raises UserError unless `folder`, which the config's `key` names, exists and is a folder."""
    if folder.is_file():
        raise UserError(f"{key}: {folder} is a file; give the checkpoint's folder, {folder.parent}")
    if not folder.is_dir():
        raise UserError(
            f"{key}: {folder} is not a folder; `lptune download` fetches one, `lptune new-checkpoint` "
            "makes one"
        )


def check_model_files(folder: Path) -> None:
    """Raises UserError if anything in a model's folder is a link out of it, or not a file or folder."""
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if not path.name.isprintable():  # an export, after the training, lists the names as text
                    raise UserError(f"{place}: holds a file whose name is {path.name!a}; rename it")
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    model_file(folder, path)


def model_file(folder: Path, path: Path) -> Path:
    """The real path of the file `path` of the model's folder. Raises UserError for a link out of the folder:
    files of a model are also exported and published, whatever their names are.

    The hub's cache is the exception, since its files are links:
    models--OWNER--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH.
    """
    home = folder.resolve()
    homes = [home]
    for parent in home.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith(_HUB_REPOSITORIES):
            homes.append(parent.parent / "blobs")
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a circle of links
        raise UserError(f"{path}: is a link to nowhere; download the checkpoint again") from None
    if not any(target.is_relative_to(place) for place in homes):
        raise UserError(f"{path}: is a link to {target}, out of the folder; copy the file here")
    if not (target.is_file() or target.is_dir()):
        raise UserError(f"{path}: is {kind_of(target)}, where a model has files; remove it")
    return target


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
