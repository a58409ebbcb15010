"""manifest.json: what a checkpoint folder must hold, byte for byte.

safetensors notices truncation but no flipped bit, and nothing notices a file of another step. The manifest
lists every file's size and sha256, the step, and which part of which tensor lies where; it carries a digest
of itself.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lptune
from lptune.checkpoint.files import read_json, sha256, write_json
from lptune.config import UserError
from lptune.distributed import SideGroup

NAME = "manifest.json"
_VERSION = 2


@dataclass(frozen=True)
class Shard:
    """A rectangle of a tensor: rows [start, start + rows), columns [column, column + columns).

    `file` stores it under the tensor's name, beginning with row `at`.
    """

    file: str
    start: int
    rows: int
    column: int
    columns: int
    """1 for what has fewer than two dimensions."""
    at: int


@dataclass(frozen=True)
class FileEntry:
    """A file's entry in the manifest."""

    size: int
    """In bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder says it holds."""

    folder: Path
    step: int
    world_size: int
    shards: dict[str, list[Shard]]
    """Tensor name -> where its parts are."""
    files: dict[str, FileEntry]
    """By name, all but the manifest itself."""


def step_folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """100 for `step-00000100`."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints of a run, newest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=step_of, reverse=True)


def describe_file(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest; the rank that wrote the file makes it."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(
    folder: Path, step: int, world_size: int, files: dict[str, dict[str, Any]], shards: dict[str, list[Shard]]
) -> None:
    """files: `describe_file` of every file in `folder`."""
    missing = {path.name for path in folder.iterdir()} ^ set(files)
    assert not missing, missing
    content: dict[str, Any] = {
        "version": _VERSION,
        "step": step,
        "world_size": world_size,
        "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
        "files": files,
        "shards": {name: [asdict(shard) for shard in parts] for name, parts in shards.items()},
    }
    write_json(folder / NAME, content | {"digest": _digest(content)})


def num_threads() -> int:
    """Threads of this process for writing and hashing: its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def verify(folder: Path, group: SideGroup | None = None) -> Manifest:
    """Checks every byte of a checkpoint folder against its manifest. Raises UserError naming the first
    fault.

    group: all its ranks call this, each hashes its share of the files, and all of them raise alike.
    """
    manifest = line = None
    try:
        manifest = read_manifest(folder)
        mine = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        if group is not None:
            mine = mine[group.rank :: group.size]
        with ThreadPoolExecutor(num_threads()) as pool:  # hashing lets go of the GIL
            list(pool.map(lambda name: _check_file(folder / name, manifest.files[name]), mine))
    except UserError as error:
        line = str(error)
    if group is not None:
        line = group.first_line(line)
    if line is not None:
        raise UserError(line)
    assert manifest is not None
    return manifest


def check_sizes(folder: Path) -> Manifest:
    """`verify` without reading the files: that all are there, with as many bytes as the manifest says."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry)
    return manifest


def _check_file(file: Path, entry: FileEntry) -> None:
    _check_size(file, entry)
    try:
        found = sha256(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if found != entry.sha256:
        raise UserError(f"{file}: its content does not match the manifest's sha256")


def _check_size(file: Path, entry: FileEntry) -> None:
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file}: is missing from the checkpoint")
    size = file.stat().st_size
    if size != entry.size:
        raise UserError(f"{file}: has {size} bytes, the manifest says {entry.size}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, whose files are not looked at."""
    return _read(folder)


def _read(folder: Path) -> Manifest:
    path = folder / NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    if not path.is_file():
        raise UserError(f"{folder}: has no {NAME}; it is no finished checkpoint")
    content = read_json(path)
    version = content.get("version") if isinstance(content, dict) else None
    if version != _VERSION:
        raise UserError(
            f"{path}: is not a manifest of version {_VERSION} (found {version!r}); another version of lptune "
            "wrote it"
        )
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise UserError(f"{path}: its own digest does not match; the file was changed")
    if folder.name != step_folder_name(content["step"]):
        raise UserError(
            f"{path}: is of step {content['step']}, the folder says {folder.name}; it was renamed or swapped"
        )
    shards = {name: [Shard(**shard) for shard in parts] for name, parts in content["shards"].items()}
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    return Manifest(folder, content["step"], content["world_size"], shards, files)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
