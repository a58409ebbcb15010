"""The header of a safetensors file: names, shapes and dtypes of its tensors, and what the file is if it is
none.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lptune.config import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

MAX_HEADER_BYTES = 100_000_000
"""Limit of the header of a safetensors file, set by the format."""

# Old Llama checkpoints store this table. It can be computed from config.json, so it is ignored.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its safetensors header describes it: file name, shape, dtype."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises UserError if it is not such a file, or if the dtype
    of a tensor is not a float dtype.
    """
    found = {}
    for name, (stored_as, shape) in read_shapes(path).items():
        dtype = DTYPES.get(stored_as)
        if dtype is None and not DERIVED.search(name):
            raise UserError(
                f"{path}: tensor {name!r} is stored as {stored_as}; only {', '.join(DTYPES)} can be trained "
                "(a quantized checkpoint cannot)"
            )
        found[name] = StoredTensor(path.name, shape, dtype or torch.float32)
    return found


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype in the format's spelling, shape) of every tensor of a safetensors file, by name. Raises
    UserError if it is not such a file.
    """
    with open_tensors(path) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (no mapping)
        return {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}


def open_tensors(path: Path) -> Any:
    """The opened safetensors file at `path`, on the CPU. Raises UserError if it is not such a file."""
    _check_header_size(path)
    try:
        return safe_open(str(path), framework="pt", device="cpu")
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
