"""Tokenized documents on disk: made once per machine, mapped by all its ranks and by later runs.

    FOLDER/KEY/manifest.json    key, sha256 of each array, what the report says
    FOLDER/KEY/tokens_T.bin …   the arrays of `Documents`, end to end, little-endian
    FOLDER/KEY.lock             held while the entry is made

KEY is a digest of everything that decides the documents: the content of the files, without their dates; every
setting but those that are applied later; the tokenizer and the template as they are used; the versions of the
libraries that do the work; and the source of this package, so that an entry of another version of lptune is
never used. An entry is written under a temporary name, batch by batch, and published by a rename, so an entry
is complete or does not exist. An entry that does not match its manifest is made again. Nothing in it is
unpickled, and no link is followed. The files are private, since they hold the user's data.
"""

import dataclasses
import errno
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import date, time
from decimal import Decimal
from functools import cache
from importlib.metadata import version
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from lptune.base import cache as base_cache
from lptune.base.errors import UserError, remedy
from lptune.base.files import Lock, fsync_path, kind_of, open_regular, parse_json, write_bytes
from lptune.config import DataConfig, data_files
from lptune.data.documents import DTYPES, Documents, concatenated
from lptune.data.errors import BadRows
from lptune.data.sources import JsonFloat, read_rows
from lptune.data.tokenizer import Tokenizer

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_PARTIAL = ".tmp-"

Facts = dict[str, Any]
Make = Callable[[Callable[[Documents], None]], Facts]
"""A function that passes documents on, part by part, and returns further facts on them as JSON values."""


class Stored(NamedTuple):
    """Documents in memory or in the cache, with notes."""

    documents: Documents
    facts: Facts
    notes: list[str]
    """Lines for the report: where the documents are cached, and what was wrong with the cache."""


class _DamagedError(Exception):
    """The entry is damaged; the message says how."""


class _UnusableError(Exception):
    """The cache folder cannot be used; the message says why."""


def in_memory(make: Make) -> Stored:
    """The documents of `make`, in the memory of this process, not cached."""
    parts: list[Documents] = []
    facts = make(parts.append)
    return Stored(concatenated(parts), facts, [])


def cache_folder(cache: str) -> Path:
    """The folder that `data.cache` names; `auto` is the user's cache directory."""
    if cache == "auto":
        return base_cache.folder() / "data"
    try:
        return Path(cache).expanduser()
    except RuntimeError:  # of an unknown user
        raise UserError(f"data.cache: {cache}: there is no such home folder; name another folder") from None


def cached(cache: str, key: str, make: Make) -> Stored:
    """The documents of `key` from the folder that `data.cache` names. They are made and stored if missing.

    Several processes may call this at once: one makes the entry, the others wait. If the folder cannot be
    used, the documents stay in memory with a note (`auto`), or, for a folder that the user named, UserError
    is raised. Errors of `make` are passed on.
    """
    folder = cache_folder(cache)
    try:
        return _found_or_made(folder, key, make)
    except _UnusableError as problem:
        reason, cause = f"{folder} cannot be used ({problem})", problem.__cause__
    if cache != "auto":
        todo = remedy(cause, "make room, name another folder")
        raise UserError(f"data.cache: {reason}; {todo}, or set data.cache=none")
    todo = remedy(cause, "set data.cache to a folder that can be written, or to none")
    note = f"nothing is cached: {reason}; {todo}"
    return in_memory(make)._replace(notes=[note])


def _found_or_made(folder: Path, key: str, make: Make) -> Stored:
    notes: list[str] = []
    with suppress(_DamagedError):
        if (found := _open(folder, key)) is not None:
            _remove_partials(folder, None)
            return found
    with _own_files():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(folder / f"{key}.lock", mode=0o600, wait=True)
    try:
        with lock:
            try:
                if (found := _open(folder, key)) is not None:
                    return found
            except _DamagedError as problem:
                notes = [f"the cache entry {folder / key} was damaged ({problem}) and is made anew"]
                _remove(folder, key)
            # Without locks, each process makes its own entry; the first rename wins, with the same content.
            _write(folder, key, make, is_held=not lock.why_not)
            found = _open(folder, key)
    except _DamagedError as problem:
        raise UserError(
            f"data.cache: {folder / key} is not what was written to it ({problem}); name another folder"
        ) from None
    assert found is not None
    return found._replace(notes=[*notes, *found.notes])


@contextmanager
def _own_files() -> Iterator[None]:
    """Marks an OSError in the block as one of the cache: an OSError of `make` is one of the source."""
    try:
        yield
    except (OSError, UserError) as error:  # UserError: anything but a file is in the place of one
        raise _UnusableError(getattr(error, "strerror", None) or str(error)) from error


def _write(folder: Path, key: str, make: Make, is_held: bool) -> None:
    partial = folder / f"{_PARTIAL}{key}-{secrets.token_hex(4)}"
    with _own_files():
        _remove_partials(folder, key if is_held else None)
        partial.mkdir(mode=0o700)
    try:
        with ExitStack() as files:
            writer = _Writer(partial, files)
            facts = make(writer.add)
            manifest = {"key": key, "facts": facts, "arrays": writer.finish()}
        manifest["digest"] = _digest(manifest)
        with _own_files():
            write_bytes(partial / _MANIFEST, json.dumps(manifest).encode(), mode=0o600)
            try:
                partial.rename(folder / key)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process was first
                    raise
            fsync_path(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Writer:
    """Appends documents to the files of an entry."""

    @_own_files()
    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._files = {}
        for name in DTYPES:
            descriptor = os.open(folder / f"{name}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._files[name] = os.fdopen(descriptor, "wb")
            files.callback(_close, self._files[name])
        self._sums = {name: hashlib.sha256() for name in DTYPES}
        self._num_tokens = 0
        self._append("offsets_N1", np.zeros(1, dtype=np.int64))

    def add(self, part: Documents) -> None:
        """Appends the documents of one batch."""
        for name in DTYPES:
            array = getattr(part, name)
            self._append(name, array[1:] + self._num_tokens if name == "offsets_N1" else array)
        self._num_tokens += len(part.tokens_T)

    def _append(self, name: str, array: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(array, dtype=DTYPES[name]).tobytes()
        self._sums[name].update(data)
        with _own_files():
            self._files[name].write(data)

    @_own_files()
    def finish(self) -> dict[str, str]:
        """Flushes the files to disk; returns the digest of each."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: sha.hexdigest() for name, sha in self._sums.items()}


@_own_files()
def _open(folder: Path, key: str) -> Stored | None:
    """The entry, mapped, after a comparison with its manifest; None if it does not exist."""
    entry = folder / key
    if not (found := kind_of(entry)):
        return None
    if found != "a folder":
        raise _DamagedError(f"it is {found}")
    manifest = _read_manifest(entry, key)
    arrays = {name: _mapped(entry, name, manifest["arrays"].get(name)) for name in DTYPES}
    with suppress(OSError):
        os.utime(entry)  # the time of its last use, for cleaning up
    arrays["answers_N2"] = arrays["answers_N2"].reshape(-1, 2)
    size = sum(array.nbytes for array in arrays.values())
    note = f"documents cached in {entry} ({size / 1e6:,.0f} MB); see data.cache"
    return Stored(Documents(**arrays), manifest["facts"], [note])


def _read_manifest(entry: Path, key: str) -> dict[str, Any]:
    with _open_file(entry / _MANIFEST) as file:
        content = file.read(_MAX_MANIFEST_BYTES + 1)
    try:
        manifest = parse_json(content[:_MAX_MANIFEST_BYTES])
        digest = manifest.pop("digest")
        same = (manifest["key"], digest) == (key, _digest(manifest))
    except (ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise _DamagedError(f"{_MANIFEST} does not match its digest")
    return dict(manifest)


def _mapped(entry: Path, name: str, expected: str | None) -> np.ndarray[Any, Any]:
    """The array in the file `name`, mapped: read-only, and read from disk when it is accessed."""
    with _open_file(entry / f"{name}.bin") as file:
        # Not of the mapping: that would make the whole file resident in this process.
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise _DamagedError(f"{name}.bin does not match its digest")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype=DTYPES[name])


def _open_file(path: Path) -> BufferedReader:
    try:
        return os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except FileNotFoundError as error:
        raise _DamagedError(f"{path.name}: {error.strerror}") from None
    except UserError:
        raise _DamagedError(f"{path.name}: is not a regular file") from None


@_own_files()
def _remove(folder: Path, key: str) -> None:
    """Removes an entry. If a link stands in its place, removes the link, not its target."""
    aside = folder / f"{_PARTIAL}{key}-{secrets.token_hex(4)}"
    (folder / key).rename(aside)
    if aside.is_symlink() or not aside.is_dir():
        aside.unlink()
    else:
        shutil.rmtree(aside)


def _remove_partials(folder: Path, held_key: str | None) -> None:
    """Removes unfinished entries of killed processes: those whose lock is free.

    held_key: the key whose lock this process itself holds.
    """
    for partial in folder.glob(f"{_PARTIAL}*"):
        key = partial.name.removeprefix(_PARTIAL).partition("-")[0]
        if key == held_key:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        with suppress(OSError, UserError), Lock(folder / f"{key}.lock", os.O_RDWR) as lock:
            if not lock.why_not:
                shutil.rmtree(partial, ignore_errors=True)


def _close(file: Any) -> None:
    with suppress(OSError):  # the buffer may hold bytes that failed before
        file.close()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


MIN_BYTES = 1024 * 1024
"""Preparing a source smaller than this is faster than looking it up."""
_APPLIED_LATER = (
    "packing", "cut_text", "eval_fraction", "eval_source", "eval_split", "cache",
    "chat_template",  # part of the tokenizer
)  # fmt: skip


class Content(NamedTuple):
    """The content of a source, for the key."""

    digest: str
    stat: tuple[tuple[int, int, int], ...]
    """Of each file, to notice a change while it is read; empty if the source has no files."""


def content_of(source: str, cfg: DataConfig) -> Content | None:
    """The content of a source: the bytes and names of files; for other sources and with `max_rows`, the rows.

    cfg: the config of this source alone.

    None if the source must not be cached: `builtin`, a source below MIN_BYTES, a file that cannot be opened,
    rows with values such as images, which neither JSON nor `_encoded` can write.
    """
    if source == "builtin":
        return None
    files = data_files(source)
    stat = files_stat(files)
    if files is not None and sum(size for _, size, _ in stat) < MIN_BYTES:
        return None
    sha = hashlib.sha256()
    if files is not None and cfg.max_rows is None:
        try:
            for path in files:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    sha.update(f"{digest} {path}\0".encode(errors="surrogateescape"))
        except OSError:
            return None
        return Content(sha.hexdigest(), stat)
    num_bytes = 0
    for row in read_rows(source, BadRows(cfg.on_bad_row), split=cfg.split, max_rows=cfg.max_rows):
        try:
            texts = [each.text for each in row.values.values() if isinstance(each, JsonFloat)]
            # Without its line, which has the same values.
            data = json.dumps([*row[:3], texts], default=_encoded).encode() + b"\0"
        except (TypeError, ValueError, RecursionError):
            return None
        sha.update(data)
        num_bytes += len(data)
    return Content(sha.hexdigest(), stat) if num_bytes >= MIN_BYTES else None


def _encoded(value: Any) -> dict[str, str]:
    """JSON for values of Parquet and of hub datasets that JSON lacks; equal in any process. TypeError for
    other types, whose repr may hold an address.
    """
    if not isinstance(value, bytes | date | time | Decimal):  # a datetime is a date, too
        raise TypeError(type(value).__name__)
    return {"\0": repr(value)}


def files_stat(files: Sequence[Path] | None) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and time of change of each file of a source; empty if it has no files."""
    stats = [path.stat() for path in files or []]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def cache_key(
    content: Content, cfg: DataConfig, tokenizer: Tokenizer, *, is_training: bool, reading: str
) -> str:
    """The key, 32 hexadecimal digits. cfg: the config of this source alone.

    reading: how its rows are read, as in `prepare.py`.
    """
    settings = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in _APPLIED_LATER}
    parts = {
        "code": _code(),
        "versions": [tokenizers.__version__, version("jinja2"), version("transformers")],
        "content": content.digest,
        "settings": settings,  # with the name of the source, which report and errors show
        "reading": reading,
        "is_training": is_training,  # an evaluation source may lack a few things
        "tokenizer": _tokenizer(tokenizer),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    template = tokenizer.template
    sources = template.sources if template else {}
    return {
        "backend": hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest(),
        "special_tokens": tokenizer.special_tokens,
        "ids": [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id],
        "around": [tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.continuation],
        "template": sources,
        # The date counts only if the template can write it.
        "date": str(template.date) if template and "strftime_now" in "".join(sources.values()) else None,
    }


@cache
def _code() -> str:
    """A digest of this package's source."""
    sha = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()
