"""`data.source` as a list, one entry per data source with its weight and its own keys; and the files that a
source names: one file, the files of a folder, or what a glob matches.

The launcher asks for the files before torch is imported, and the reader when it reads: both get the same
answer.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError, closest
from lptune.config.checks import check_path, one_of, positive

FORMATS = ("auto", "pairs", "chat", "text")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
MAX_WEIGHT = 1000
"""Each copy of a document takes 48 bytes on every rank: a typing error must not take all memory."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One data source. A key other than `source`, `name` and `weight` overrides the key of the same name in
    `data` for this source; None: as in `data`.
    """

    source: str
    """A file, a folder, a glob, a hub dataset id, or `builtin`."""
    weight: float = 1.0
    """How often an epoch uses each document of this source. 2: each document twice. 0.5: a random half of the
    documents, the same half in all epochs, chosen by the seed. 2.5: each twice, and a half once more."""
    name: str | None = None
    """What metrics call this source: letters, digits and ._-. None: the file, the folder or the hub id."""
    split: str | None = None
    format: str | None = None
    prompt_column: str | None = None
    input_column: str | None = None
    response_column: str | None = None
    messages_column: str | None = None
    text_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None
    system_column: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None


Source = str | tuple[str | SourceConfig, ...]
"""The type of `data.source`."""


def entries(source: Source | None) -> tuple[SourceConfig, ...]:
    """One entry for each item of a list, one for a string, none for None."""
    listed = () if source is None else (source,) if isinstance(source, str) else source
    return tuple(SourceConfig(source=item) if isinstance(item, str) else item for item in listed)


def check_source(key: str, source: Source) -> None:
    """Raises UserError unless `source` is legal for `key`, which is data.source or data.eval_source."""
    if not source and not isinstance(source, str):
        raise UserError(f"{key}: is an empty list; put a source into it")
    for number, entry in enumerate(entries(source)):
        name = key if isinstance(source, str) else f"{key}[{number}]"
        check_path(name, entry.source)
        positive(f"{name}.weight", entry.weight)
        if entry.weight > MAX_WEIGHT:
            raise UserError(f"{name}.weight: must be at most {MAX_WEIGHT}, found {entry.weight}")
        if entry.weight != 1 and key == "data.eval_source":
            raise UserError(f"{name}.weight: evaluation sees each document once; leave the weight out")
        if entry.format is not None:
            one_of(f"{name}.format", entry.format, FORMATS)
        if entry.name is not None and not _NAME.fullmatch(entry.name):
            raise UserError(
                f"{name}.name: must be at most 40 letters, digits, '.', '_' or '-', found {entry.name!r:.60}"
            )
    given = [entry.name for entry in entries(source) if entry.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise UserError(f"{key}: two entries have the name {name!r}; metrics need one for each")


def source_names(sources: Sequence[SourceConfig]) -> str:
    """The sources without their folders, for a model card: `a.jsonl (weight 2), shards/*.jsonl`."""
    return ", ".join(_name(entry) for entry in sources)


def _name(entry: SourceConfig) -> str:
    path = Path(entry.source)
    is_glob = any(mark in path.name for mark in "*?[")  # keeps its last folder: `*.jsonl` says little
    name = "/".join(path.parts[-2:]) if is_glob else path.name or entry.source
    if is_glob:  # `[…]` may hold the value of any variable, and still name a file
        name = re.sub(r"\[!?\]?[^\]]*\]", "[…]", name)
    return name if entry.weight == 1 else f"{name} (weight {entry.weight:g})"


SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_GLOB = re.compile(r"[*?\[]")


def data_files(source: str) -> list[Path] | None:
    """The files of `source`, in the order in which they are read; None for `builtin` and for a hub id.

    Of a folder: the files of a known kind that lie directly in it, sorted by name, without hidden files. A
    path that exists is never read as a glob. Raises UserError (one line) where there is no file, or a file of
    an unknown kind.
    """
    if source == "builtin":
        return None
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            files = _in_folder(source, path)
        elif path.exists() or path.is_symlink():
            files = [path]
        elif _GLOB.search(source):
            files = _matches(source, path)
        elif _HUB_ID.fullmatch(source) and path.suffix not in SUFFIXES and not path.parent.exists():
            return None
        else:
            raise UserError(_missing(source, path))
        for file in files:
            _check_kind(source if file is path else str(file), file)
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None
    return files


def left_out(source: str) -> list[str]:
    """Names in a folder that are not read, without hidden files: `README.md`, `old/`."""
    path = Path(source).expanduser()
    if not path.is_dir() or source == "builtin":
        return []
    names = (f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
    return sorted(name for name in names if not name.startswith(".") and not _is_known(name))


def check_sources(key: str, sources: Sequence[SourceConfig]) -> None:
    """Raises UserError where a source has no file, where a file would be read twice in the same way, or where
    a split is asked of files, which have none.

    key: data.source or data.eval_source, for the message of the UserError (one line).
    """
    seen: dict[tuple[Any, SourceConfig], str] = {}
    for entry in sources:
        try:
            files = data_files(entry.source)
        except UserError as error:
            raise UserError(str(error).replace("data.source", key)) from None
        if files is not None and entry.split:
            raise UserError(
                f"{key}: {entry.source} is on this machine, and only data sets of the hub have splits; name "
                f"the files of {entry.split!r} as a source, and leave the split out"
            )
        reading = replace(entry, source="", name=None, weight=1.0)
        for name in [entry.source] if files is None else map(str, files):
            place = (name if files is None else _identity(name), reading)
            if place in seen:
                where = (
                    "" if seen[place] == name == entry.source else f", by {seen[place]} and {entry.source}"
                )
                raise UserError(
                    f"{key}: {name} is read twice{where}; take it out of one of them (to go over a source "
                    "twice give it weight: 2)"
                )
            seen[place] = entry.source


def _identity(file: str) -> tuple[int, int]:
    """Device and inode: the same for a file through every link, hard link and mount."""
    stat = os.stat(file)
    return stat.st_dev, stat.st_ino


def _in_folder(source: str, folder: Path) -> list[Path]:
    files = sorted(entry for entry in folder.iterdir() if _is_read(entry) and not entry.is_dir())
    if not files:
        below = next((file for file in sorted(folder.glob("*/*")) if _is_read(file)), None)
        hint = f"; its folders hold some: data.source={source.rstrip('/')}/*/*{below.suffix}" if below else ""
        raise UserError(
            f"{source}: is a folder without a file that data.source reads ({', '.join(SUFFIXES)}){hint}"
        )
    return files


def _matches(source: str, path: Path) -> list[Path]:
    found = {Path(name) for name in glob.glob(str(path), recursive=True)}  # `**` finds some more than once
    files = sorted(file for file in found if not file.is_dir())
    if not files:
        raise UserError(f"{source}: no file has this name or matches this pattern; check data.source")
    return files


def _is_known(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _is_read(entry: Path) -> bool:
    return _is_known(entry.name) and not entry.name.startswith(".")


def _check_kind(name: str, file: Path) -> None:
    if not file.is_file():
        if file.is_symlink() and not file.exists():
            raise UserError(f"{name}: is a link to nowhere; set data.source to a file")
        raise UserError(f"{name}: is not a regular file; set data.source to one")
    if not _is_known(file.name):
        kind = f"unknown kind of file {file.suffix!r}" if file.suffix else "a file without a suffix"
        raise UserError(
            f"{name}: {kind}; data.source reads {', '.join(SUFFIXES)}, folders of them and hub ids"
        )


def _missing(source: str, path: Path) -> str:
    pieces = [piece.strip() for piece in source.split(",")]
    is_list = len(pieces) > 1 and any(Path(piece).expanduser().exists() for piece in pieces if piece)
    if is_list or (source.startswith("{") and source.endswith("}")):
        return f"{source}: no such file; a list stands in brackets: data.source='[{source}]'"
    if not path.parent.is_dir():
        return f"{source}: no such file, nor a folder {path.parent}; set data.source to a file or a hub id"
    names = [entry.name for entry in path.parent.iterdir()]
    hint = closest(path.name, names if path.parent != Path() else [*names, "builtin"])
    return f"{source}: no such file{hint}; set data.source to a file, a folder, a hub id or builtin"


def metric_names(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """A name for each source, for the keys of metrics: unique, of at most 40 letters, digits and ._- (before
    a number that makes it unique).
    """
    taken = {entry.name for entry in sources}
    names = []
    for entry in sources:
        name = entry.name
        if name is None:
            parts = [part for part in Path(entry.source).parts if not any(mark in part for mark in "*?[")]
            last = Path(parts[-1]) if parts else Path("source")
            stem = last.stem if last.suffix.lower() in SUFFIXES else last.name
            name = base = re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("_")[:40] or "source"
            number = 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
        names.append(name)
    return tuple(names)
