"""Files: the one way to write a file, and the one way to read a file of JSON or JSON lines.

A file is written under a temporary name in the same folder, flushed to the disk and renamed. So a reader, or
a run that resumes after a kill, sees the old content or the new content, never a part. A link at the path is
replaced, not followed. Nothing replaces a pipe, a device or a folder.

JSON may come from anyone, so its size and its depth have limits. Python's parser raises RecursionError at a
thousand levels, and so does a function that walks over less deep values. No real file has a tenth of that.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lptune.config import MEBI, TEMPORARY, UserError, kind_of, named, open_regular, raw_lines

MAX_BYTES = 64 * MEBI
"""Of a JSON file: eight times the size of the index of a model with 90,000 tensors."""
_MAX_LEVELS = 100
_TOO_DEEP = "its brackets are nested too deep"


def fsync_path(path: Path) -> None:
    """Flushes a file's data or a folder's entries to disk."""
    with named(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields the name of a new file, which becomes `path` after the block. If the block raises, `path` stays.

    shared: other processes may write `path` meanwhile; the last rename wins. Otherwise the temporary name is
    always the same, so that the next write removes what a kill has left. Raises OSError that names the file,
    also if `path` is, or leads to, anything but a file.
    """
    if (found := kind_of(path, follow=True)) not in ("", "a file"):
        raise OSError(errno.EINVAL, f"it is {found}, not a file", str(path))
    if path.is_symlink() and path.readlink().is_relative_to("/proc"):  # /dev/stdout, also if redirected
        raise OSError(errno.EINVAL, "it is a link to a stream, not a file", str(path))
    suffix = f"-{secrets.token_hex(6)}" if shared else ""
    partial = path.with_name(f"{TEMPORARY}{path.name}{suffix}")
    with named(partial):
        with suppress(FileNotFoundError):  # left by a kill, or put there by another program
            partial.unlink()
        try:
            yield partial
            fsync_path(partial)
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    fsync_path(path.parent)


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, shared: bool = False) -> None:
    """Writes the file by `replacing`. mode: as for os.open, before the umask."""
    with replacing(path, shared=shared) as partial:
        descriptor = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes `text` in UTF-8 by `replacing`."""
    write_bytes(path, text.encode(), shared=shared)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON by `replacing`. Half a surrogate pair, which JSON may hold as an escape
    and UTF-8 cannot, is an escape again.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False)
    write_text(path, re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text) + "\n")


@contextmanager
def write_errors(where: str, todo: str) -> Iterator[None]:
    """An OSError of the block is a UserError: `where` cannot be written, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{where} cannot be written: {error.strerror or error}; {todo}") from None


def read_bytes(path: Path, max_bytes: int, *, follow: bool = True) -> bytes:
    """The bytes of the regular file at `path`. Raises UserError, also if there are more than `max_bytes`.

    follow: a link, as in the hub's cache.
    """
    try:
        with open(open_regular(path, os.O_RDONLY, follow=follow), "rb") as file:
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: is larger than {max_bytes:,} bytes, so it is something else")
    return content


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, todo: str = "", follow: bool = True) -> Any:
    """The JSON at `path`. Raises UserError: the file, the line, the problem and `todo`."""
    try:
        return parse_json(read_bytes(path, max_bytes, follow=follow))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}{todo and '; '}{todo}") from None


def read_object(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    todo: str = "",
    missing: dict[str, Any] | None = None,
    follow: bool = True,
) -> dict[str, Any]:
    """The JSON object at `path`. missing: what to return without a file; None: raises UserError."""
    if missing is not None and not kind_of(path, follow=follow):
        return missing
    found = read_json(path, max_bytes=max_bytes, todo=todo, follow=follow)
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(found).__name__}{todo and '; '}{todo}")
    return found


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError with the line and the problem, also for deep nesting."""
    try:
        value = json.loads(content if isinstance(content, str) else content.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text, as JSON is") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:  # Python's limit for integers
        raise ValueError("a number in it is too long") from None
    if is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def is_deep(value: Any) -> bool:
    """Whether lists and objects in `value` are nested deeper than in any real file."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_LEVELS + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for items in inner for each in items if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


def lines_of(path: Path, max_bytes: int = MEBI) -> Iterator[bytes]:
    """The lines of a file of JSON lines, each with its line feed; none without a file. Follows no link.

    max_bytes: of a line; a run's metrics have less than a thousandth. Raises LongLineError for a longer line,
    UserError for anything but a regular file, and OSError with the name of the file.
    """
    if kind_of(path):
        with named(path), open(open_regular(path, os.O_RDONLY), "rb") as file:
            yield from raw_lines(file, max_bytes)


def object_of(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is none."""
    with suppress(ValueError):
        if isinstance(value := parse_json(line), dict):
            return value
    return None
