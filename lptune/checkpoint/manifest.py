"""manifest.json: what a checkpoint folder must hold, byte for byte.

safetensors notices truncation but no flipped bit, and nothing notices a file of another step. The manifest
lists every file's size and sha256, the step, and which rows of which tensor lie where; it carries a digest of
itself.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lptune
from lptune.checkpoint.files import read_json, sha256, write_json
from lptune.config import UserError

NAME = "manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """Rows [start, start + rows) of a tensor, as stored in `file`."""

    file: str
    start: int
    rows: int


@dataclass(frozen=True)
class Manifest:
    """A verified checkpoint folder."""

    folder: Path
    step: int
    world_size: int
    shards: dict[str, list[Shard]]
    """Tensor name -> where its rows are."""


def step_folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def write_manifest(folder: Path, step: int, world_size: int, shards: dict[str, list[Shard]]) -> None:
    """Describes every file now in `folder`."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    content: dict[str, Any] = {
        "version": _VERSION,
        "step": step,
        "world_size": world_size,
        "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
        "files": files,
        "shards": {name: [asdict(shard) for shard in parts] for name, parts in shards.items()},
    }
    write_json(folder / NAME, content | {"digest": _digest(content)})


def verify(folder: Path) -> Manifest:
    """Checks every byte of a checkpoint folder against its manifest. Raises UserError naming the first
    fault.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    if not (folder / NAME).is_file():
        raise UserError(f"{folder}: has no {NAME}; it is no finished checkpoint")
    content = read_json(folder / NAME)
    path = folder / NAME
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise UserError(f"{path}: is not a manifest of version {_VERSION}")
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise UserError(f"{path}: its own digest does not match; the file was changed")
    if folder.name != step_folder_name(content["step"]):
        raise UserError(
            f"{path}: is of step {content['step']}, the folder says {folder.name}; it was renamed or swapped"
        )
    for name, expected in content["files"].items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: is missing from the checkpoint")
        size = file.stat().st_size
        if size != expected["size"]:
            raise UserError(f"{file}: has {size} bytes, the manifest says {expected['size']}")
        if sha256(file) != expected["sha256"]:
            raise UserError(f"{file}: its content does not match the manifest's sha256")
    shards = {name: [Shard(**shard) for shard in parts] for name, parts in content["shards"].items()}
    return Manifest(folder, content["step"], content["world_size"], shards)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
