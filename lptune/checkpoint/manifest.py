"""manifest.json: lists the files and tensors of a checkpoint, so that every changed byte is noticed.

safetensors notices a truncated file, but neither a flipped bit nor a file of another step. The manifest lists
the step, the size and sha256 of every file, and the file and position of each part of each tensor. Its last
line is the sha256 of all bytes before it, so a change of the manifest is noticed too.

A digest finds damage, but not a forged checkpoint, whose digests can be right. So the content of the manifest
is checked like any other input: types and ranges, file names without folders, boxes that tile their tensor,
and files that contain exactly the listed tensors. Dtypes and the dimensions after the first two are in the
headers of the files, and must agree in all files of a tensor.

Boxes must tile: after a gap, some weights would keep the values from before loading; with an overlap, an
element would have two values. Comparing all pairs of parts takes half a million comparisons per tensor for a
thousand ranks. Counting corners takes one pass. Let f(point) be the number of boxes that contain a point.
Each corner flips the parity of f for all points beyond it in every dimension. So if the corners that occur an
odd number of times are exactly the corners of the whole tensor, f is odd inside it, hence at least 1. If the
volumes of the boxes also add up to the volume of the tensor, f is 1 everywhere.

Versions. 3: the parts of a tensor are rectangles in its first two dimensions. 4: some parts are boxes that
are cut in another dimension too. A checkpoint without such boxes is written as version 3, so that older
versions of lptune can read it.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lptune
from lptune.base.errors import UserError
from lptune.base.files import MEBI, parse_json, read_bytes, write_text
from lptune.base.step_folders import step_folder_name
from lptune.checkpoint.files import num_threads, sha256, why
from lptune.distributed import SideGroup
from lptune.models.headers import read_shapes

NAME = "manifest.json"
_RECTANGLES, _BOXES = 3, 4
"""The two versions of the manifest; see above."""
_MAX_BEYOND = 6
"""Limit of dimensions after the first two. Tiling looks at all corners of a box: 2 ** dimensions."""
_MAX_BYTES = 1024 * MEBI
"""A manifest of 4,096 ranks with 2,000 tensors each (70B with AdamW's moments) has three quarters of it."""
_MAX_INTEGER = 2**53
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(safetensors|json)")


class Shard(NamedTuple):
    """A box of a tensor, stored in `file` under the tensor's name."""

    file: str
    box: tuple[tuple[int, int], ...]
    """(first, number) of rows and of columns, (0, 1) where the tensor has none, and of all further dimensions
    if one of these is cut.
    """
    at: int
    """The row of the stored tensor from which on it is there."""

    @property
    def num_rows(self) -> int:
        """Number of its rows in the tensor."""
        return self.box[0][1]

    def to_json(self) -> dict[str, Any]:
        """The shard as a JSON object, with `beyond` for dimensions after the first two."""
        (start, rows), (column, columns), *beyond = self.box
        part = {"file": self.file, "start": start, "rows": rows, "column": column, "columns": columns}
        return part | {"at": self.at} | ({"beyond": beyond} if beyond else {})

    @staticmethod
    def from_json(part: Mapping[str, Any]) -> "Shard":
        """The inverse of `to_json`. Does not check values: see `_shard`."""
        beyond = [(first, number) for first, number in part.get("beyond", ())]
        box = ((part["start"], part["rows"]), (part["column"], part["columns"]), *beyond)
        return Shard(part["file"], box, part["at"])


@dataclass(frozen=True)
class FileEntry:
    """Size and digest of a file, from the manifest."""

    size: int
    """Size of the file in bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest whose values were checked."""

    folder: Path
    step: int
    world_size: int
    shards: dict[str, list[Shard]]
    """By tensor name: the boxes of the tensor and their files."""
    files: dict[str, FileEntry]
    """By file name: all files of the checkpoint except the manifest."""
    fetch: Callable[[str], None] | None = field(default=None, compare=False)
    """Makes a file be in `folder`, where that has only some (parts.py); None: it has all."""

    def extents(self, name: str) -> tuple[int, ...]:
        """Sizes of a whole tensor, in the dimensions of `Shard.box`. (0, 0) if the checkpoint has no such
        tensor.
        """
        boxes = [shard.box for shard in self.shards.get(name, [])] or [((0, 0), (0, 0))]
        return tuple(max(first + number for first, number in dim) for dim in zip(*boxes, strict=True))


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file: its size and sha256. The rank that wrote the file calls this."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(
    folder: Path, step: int, world_size: int, files: dict[str, dict[str, Any]], shards: dict[str, list[Shard]]
) -> None:
    """Writes manifest.json durably. files: by name, `describe_file` of every file of the checkpoint. shards:
    by tensor name.
    """
    unlisted = {path.name for path in folder.iterdir()} - set(files)  # `check_sizes` finds missing ones
    assert not unlisted, unlisted
    has_boxes = any(len(shard.box) > 2 for parts in shards.values() for shard in parts)
    content: dict[str, Any] = {
        "version": _BOXES if has_boxes else _RECTANGLES,
        "step": step,
        "world_size": world_size,
        "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
        "files": files,
    }
    # A line for each tensor: 70B on 512 ranks has a million shards.
    tensors = [
        f"    {json.dumps(name, ensure_ascii=False)}: "
        + json.dumps([shard.to_json() for shard in parts], separators=(",", ":"))
        for name, parts in shards.items()
    ]
    head = json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}")
    body = head + ',\n  "shards": {\n' + ",\n".join(tensors) + "\n  }"
    write_text(folder / NAME, body + _seal(body.encode()))


def verify(folder: Path, group: SideGroup | None = None) -> Manifest:
    """Compares every byte of a checkpoint with its manifest. Raises UserError that names the first fault.

    group: all its ranks call this. Each rank hashes its share of the files, and all ranks raise the same
    error. None: this process alone.
    """
    group = group or SideGroup()
    with group.together((UserError, OSError), why):
        manifest = read_manifest(folder)
        largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        mine = largest_first[group.rank :: group.size]
        with ThreadPoolExecutor(num_threads()) as pool:  # hashing releases the GIL
            list(pool.map(lambda name: check_file(folder / name, manifest.files[name]), mine))
        _check_stored(manifest)
    return manifest


def check_sizes(folder: Path) -> None:
    """Checks that all files exist with the sizes of the manifest, without reading them. Raises UserError."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry)


def check_file(file: Path, entry: FileEntry) -> None:
    """Compares every byte of a file with its entry. Raises UserError that says what differs."""
    _check_size(file, entry)
    if sha256(file) != entry.sha256:
        raise UserError(f"{file}: its content does not match the manifest's sha256")


def _check_size(file: Path, entry: FileEntry) -> None:
    if not file.is_file():
        raise UserError(f"{file}: is missing from the checkpoint")
    size = file.stat().st_size
    if size != entry.size:
        raise UserError(f"{file}: has {size} bytes, the manifest says {entry.size}")


def read_manifest(folder: Path, *, is_part: bool = False) -> Manifest:
    """Reads and checks the manifest of a checkpoint, but not its other files. Raises UserError. is_part: the
    folder is one machine's, and may have files that are not of the checkpoint.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    if not path.is_file():
        if any(folder.glob("step-*/")):
            raise UserError(f"{folder}: is a folder of checkpoints, not one of them")
        raise UserError(f"{folder}: has no {NAME}; it is no finished checkpoint")
    sealed = read_bytes(path, _MAX_BYTES)
    try:
        content = parse_json(sealed)
    except ValueError as error:
        raise UserError(f"{path}: {error}; the file was changed") from None
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version not in (_RECTANGLES, _BOXES):
        raise UserError(
            f"{path}: is not a manifest of version {_RECTANGLES} or {_BOXES} (found {version!r}); another "
            "version of lptune wrote it"
        )
    body = sealed[: -len(_seal(b""))]
    if sealed != body + _seal(body).encode():
        raise UserError(f"{path}: its own digest does not match; the file was changed")
    try:
        manifest = _parse(folder, content)
    except ValueError as error:
        raise UserError(f"{path}: {error}; lptune did not write this") from None
    name = step_folder_name(manifest.step)
    # A link may have any name. files.set_aside gives names old-….
    names = (folder.name, folder.resolve().name)
    if not any(re.fullmatch(rf"{name}|old-{name}-[0-9]+", each) for each in names):
        raise UserError(
            f"{path}: is of step {manifest.step}, the folder says {folder.name}; it was renamed or swapped: "
            f"call the folder {name} if its files are what you look for"
        )
    for name in (NAME, *manifest.files):
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name}: is a link; a checkpoint holds its files itself")
    for unlisted in sorted({file.name for file in folder.glob("*.safetensors")} - set(manifest.files)):
        if not is_part:
            raise UserError(f"{folder / unlisted}: is not in the manifest; it belongs to another checkpoint")
    return manifest


def _check_stored(manifest: Manifest) -> None:
    """Compares the headers of the files with the shards: the files contain exactly the listed tensors, every
    row of a stored tensor is in one shard, and all parts of a tensor agree in dtype and dimensions.
    """
    headers = {
        file: read_shapes(manifest.folder / file) for file in manifest.files if file.endswith(".safetensors")
    }
    expected: dict[str, dict[str, list[Shard]]] = {file: {} for file in headers}
    for name, parts in manifest.shards.items():
        for part in parts:
            expected[part.file].setdefault(name, []).append(part)
    for file, tensors in expected.items():
        path, header = manifest.folder / file, headers[file]
        for name in sorted(header.keys() ^ tensors.keys()):
            holder, other = ("file", "manifest") if name in header else ("manifest", "file")
            raise UserError(f"{path}: tensor {name!r} is in the {holder} but not in the {other}")
        for name, parts in tensors.items():
            dtype, shape = header[name]
            num_rows, *others = (*shape, 1, 1)[: max(2, len(shape))]
            try:
                check_rows(name, [(part.at, part.num_rows) for part in parts], num_rows)
            except ValueError as error:
                raise UserError(f"{path}: {error}") from None
            held = {tuple(number for _, number in part.box[1:]) for part in parts}
            cut = len(parts[0].box)
            if held != {tuple(others if cut > 2 else others[:1])}:
                wanted = " x ".join(["rows", *map(str, min(held))])
                raise UserError(
                    f"{path}: tensor {name!r} is {list(shape)}, the manifest says {wanted} elements"
                )
            first_file = manifest.shards[name][0].file
            first_dtype, first_shape = headers[first_file].get(name, (dtype, shape))
            if (dtype, len(shape), shape[cut:]) != (first_dtype, len(first_shape), first_shape[cut:]):
                raise UserError(
                    f"{path}: tensor {name!r} is {dtype} {list(shape)}, in {first_file} it is {first_dtype} "
                    f"{list(first_shape)}"
                )


def _seal(body: bytes) -> str:
    """The last line of the manifest: the digest of `body`, as the last key of the JSON object."""
    return f',\n  "digest": "{hashlib.sha256(body).hexdigest()}"\n}}\n'


def _parse(folder: Path, content: Mapping[str, Any]) -> Manifest:
    """Makes a Manifest of the JSON object `content`. Raises ValueError that names the first wrong value."""
    step, world_size = (_integer(content, key, minimum) for key, minimum in (("step", 0), ("world_size", 1)))
    files, listed = (_object(content.get(key), key) for key in ("files", "shards"))
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"files: {name!r} cannot be the name of a checkpoint's file")
        _integer(_object(entry, f"files: {name}"), "size", 0)
        if not re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
            raise ValueError(f"files: {name}: sha256: expected 64 hex digits, found {entry.get('sha256')!r}")
    if "state.json" not in files:
        raise ValueError("files: state.json is missing")
    shards, tensor_files = {}, {name for name in files if name.endswith(".safetensors")}
    for name, parts in listed.items():
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"shards: {name!r}: expected a list of parts, found {parts!r:.60}")
        shards[name] = [_shard(_object(part, f"shards: {name!r}"), name) for part in parts]
        unknown = [part.file for part in shards[name] if part.file not in tensor_files]
        if unknown:
            raise ValueError(f"shards: {name!r}: is in {unknown[0]!r}, which `files` does not list")
        check_tiling(name, [part.box for part in shards[name]])
    entries = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in files.items()}
    return Manifest(folder, step, world_size, shards, entries)


_LEAST = (("start", 0), ("rows", 1), ("column", 0), ("columns", 1), ("at", 0))


def _shard(part: Mapping[str, Any], name: str) -> Shard:
    where = f"shards: {name!r}: "
    if not isinstance(part.get("file"), str):
        raise ValueError(f"{where}file: expected a name, found {part.get('file')!r:.60}")
    for key, minimum in _LEAST:
        _integer(part, key, minimum, where)
    beyond = part.get("beyond", [])
    if not isinstance(beyond, list) or len(beyond) > _MAX_BEYOND:
        what = f"a list of at most {_MAX_BEYOND} dimensions"
        raise ValueError(f"{where}beyond: expected {what}, found {beyond!r:.60}")
    for each in beyond:
        if not isinstance(each, list) or len(each) != 2:
            raise ValueError(f"{where}beyond: expected a first index and a number, found {each!r:.60}")
        for i in range(2):
            _integer({"beyond": each[i]}, "beyond", i, where)
    return Shard.from_json(part)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {value!r:.60}")
    return value


def _integer(values: Mapping[str, Any], key: str, minimum: int, where: str = "") -> int:
    value = values.get(key)
    if type(value) is not int or not minimum <= value < _MAX_INTEGER:  # isinstance would accept a bool
        raise ValueError(f"{where}{key}: expected an integer from {minimum}, found {value!r:.60}")
    return value


Box = Sequence[tuple[int, int]]
"""(first, number) of each dimension, with number >= 1. For a matrix: rows, columns."""


def check_tiling(name: str, parts: Sequence[Box]) -> None:
    """Raises ValueError unless `parts` tile a tensor, whose sizes are the largest ends of the parts."""
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"shards: {name!r}: its parts have different numbers of dimensions")
    if _are_rows(parts):
        return
    odd: set[tuple[int, ...]] = set()
    for part in parts:
        for corner in _corners(part):
            odd ^= {corner}
    sizes = [max(first + number for first, number in dim) for dim in zip(*parts, strict=True)]
    volume = sum(math.prod(number for _, number in part) for part in parts)
    if odd != set(_corners([(0, size) for size in sizes])) or volume != math.prod(sizes):
        raise ValueError(
            f"shards: {name!r}: its parts overlap or leave a gap in {' x '.join(map(str, sizes))} elements"
        )


def _are_rows(parts: Sequence[Box]) -> bool:
    """Whether the parts are cut by rows alone and follow one another, as those of most tensors."""
    others = {tuple(part[1:]) for part in parts}
    end = 0
    for first, number in sorted(part[0] for part in parts):
        if first != end:
            return False
        end += number
    return len(others) == 1 and all(first == 0 for first, _ in others.pop())


def check_rows(name: str, parts: Sequence[tuple[int, int]], num_rows: int) -> None:
    """Raises ValueError unless the row ranges (first, number) in a file follow one another to `num_rows`."""
    end = 0
    for at, rows in sorted(parts):
        if at != end:
            break
        end = at + rows
    if end != num_rows:
        raise ValueError(
            f"{name!r} has {num_rows} rows, but the manifest lists only {end} without gap or overlap"
        )


def _corners(part: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*((first, first + number) for first, number in part)))
