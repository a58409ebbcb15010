"""The tensors of a Hugging Face folder by the headers of its safetensors files: names, shapes, dtypes.

A header has a few kilobytes. Faults are found from it before a weight is read and before torch is imported;
a file that has none is named for what it is. This file imports no torch.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lptune.base.errors import UserError
from lptune.base.model_folder import check_model_files, check_model_folder
from lptune.models.keys import Keys

if TYPE_CHECKING:
    from lptune.models.quantized import Quantized

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""By the format's spelling: torch's name."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of the header of a safetensors file, set by the format."""

# Old Llama checkpoints store this table. It can be computed from config.json, so it is ignored.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class StoredTensor:
    """A weight as the headers describe it: file name, shape, torch's name of its dtype. Of a quantized weight
    these are what it stands for.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    quantized: "Quantized | None" = None
    """How it is stored, if not as floats."""


@dataclass(frozen=True)
class HFIndex:
    """The tensors of a folder, in the order of its index."""

    folder: Path
    tensors: dict[str, StoredTensor]
    has_index_file: bool
    """Whether the tensors were listed by model.safetensors.index.json."""

    @property
    def files(self) -> list[str]:
        """The weight files, in order of first use."""
        return list(dict.fromkeys(tensor.file for tensor in self.tensors.values()))


def is_of_run(folder: Path) -> bool:
    """Whether `folder` is a training checkpoint, or a run's folder, which has some."""
    has_checkpoints = (folder / "checkpoints").is_dir() and not (folder / "config.json").exists()
    return has_checkpoints or (folder / "manifest.json").is_file()


def read_index(folder: Path, key: str = "model.path") -> HFIndex:
    """Reads the safetensors headers of a folder. key: of the config, for messages. Raises UserError if the
    folder cannot be loaded: no safetensors, an adapter, a run's folder, a file that is missing or damaged,
    and as `quantized.resolve` does.
    """
    check_model_folder(folder, key)
    check_model_files(folder)
    if (folder / "manifest.json").is_file() and (folder / "state.json").is_file():
        raise UserError(
            f"{key}: {folder} is a training checkpoint; `lptune export` makes a model folder of it"
        )
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        raise UserError(f"{key}: {folder} is a run's folder; the model it trained is {folder / 'export'}")
    index_path = folder / INDEX_NAME
    # If both exist, transformers reads the single file. Some folders also contain the same weights in another
    # layout, in other files.
    if (folder / SINGLE_NAME).is_file():
        return _index(folder, read_header(folder / SINGLE_NAME), False)
    if index_path.exists():
        weight_map = _weight_map(index_path)
        tensors: dict[str, StoredTensor] = {}
        for file in dict.fromkeys(weight_map.values()):
            if not (folder / file).is_file():
                raise UserError(
                    f"{index_path}: names {file}, which is not in the folder; download the checkpoint again"
                )
            stored = read_header(folder / file)
            for name in (name for name, its_file in weight_map.items() if its_file == file):
                if name not in stored:
                    raise UserError(
                        f"{index_path}: says that {file} holds {name!r}, which it does not; download the "
                        "checkpoint again"
                    )
                tensors[name] = stored[name]
        return _index(folder, {name: tensors[name] for name in weight_map}, True)
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder}: holds an adapter, not a model; merge it into its base model first (peft: "
            "merge_and_unload, save_pretrained)"
        )
    if len(files) == 1:
        return _index(folder, read_header(files[0]), False)
    if files:
        raise UserError(
            f"{folder}: holds {len(files)} safetensors files but no {INDEX_NAME}; download it again"
        )
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"{folder}: holds only pickled weights ({pickled[0]}), which are never loaded; convert them to "
            "safetensors (transformers: save_pretrained)"
        )
    raise UserError(f"{folder}: holds no *.safetensors file; give the folder of a Hugging Face checkpoint")


def _index(folder: Path, tensors: dict[str, StoredTensor], has_index_file: bool) -> HFIndex:
    from lptune.models.quantized import resolve  # it imports this file

    return HFIndex(folder, resolve(folder, tensors), has_index_file)


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = Keys.from_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: has no weight_map; download the checkpoint again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path}: {name!r} is mapped to {file!r}; a plain *.safetensors file name is needed"
            )
    return weight_map


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. A dtype that is no float keeps safetensors' spelling.
    Raises UserError if it is not such a file.
    """
    found = {}
    for name, (stored_as, shape) in read_shapes(path).items():
        dtype = "float32" if DERIVED.search(name) else DTYPES.get(stored_as, stored_as)
        found[name] = StoredTensor(path.name, shape, dtype)
    return found


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype in the format's spelling, shape) of every tensor of a safetensors file, by name. Raises
    UserError if it is not such a file.
    """
    with open_tensors(path, framework="numpy") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (no mapping)
        return {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """The opened safetensors file at `path`, on the CPU. framework: of the tensors that are read from it.
    Raises UserError if it is not such a file.
    """
    from safetensors import SafetensorError, safe_open  # here, since `lptune ls` opens no file

    _check_header_size(path)
    try:
        return safe_open(str(path), framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is no readable safetensors file: {_why(path, error)}") from None


def _check_header_size(path: Path) -> None:
    """Checks the limits of the safetensors library before it maps the file, for a clearer error message."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    header_bytes = int.from_bytes(start, "little")
    # The first 8 bytes of text or of a pickle are a large number too. `_why` explains these files.
    if len(start) == 8 and start[4:] == bytes(4) and header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise UserError(
            f"{path}: is no readable safetensors file: its header is said to have {header_bytes:,} bytes, "
            f"but the file has {size:,} ({MAX_HEADER_BYTES:,} is the limit); download it again"
        )


def _why(path: Path, error: Exception) -> str:
    """What the file is, if its first bytes show it, and what to do."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError:
        start = b""
    if start.startswith(b"version https://"):
        return "it is a git-lfs pointer; run `git lfs pull`, or download it again"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return (
            "it is a pickle of torch.save, which is never loaded; convert it to safetensors "
            "(transformers: save_pretrained)"
        )
    return f"{error}; download it again"
