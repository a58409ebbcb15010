"""Files: the one way to write a file, to lock one, and to read a file of JSON or JSON lines.

A file is written under a temporary name in the same folder, flushed to the disk and renamed. So a reader, or
a run that resumes after a kill, sees the old content or the new content, never a part. A link at the path is
replaced, not followed. Nothing replaces a pipe, a device or a folder.

A path may have been prepared by other people. A file is opened without following a link in the last part of
its path, and a pipe is refused without waiting for it.

A file may come from anyone, so its size has a limit far above any real file and far below what fills the
memory, and JSON has a limit of depth: Python's parser raises RecursionError at a thousand levels, and so does
a function that walks over less deep values. No real file has a tenth of that.
"""

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from lptune.base.errors import UserError

MEBI = 1024**2
TEMPORARY = ".tmp-"
"""Prefix of the temporary names under which files and folders are written or removed, in the same folder."""
MAX_BYTES = 64 * MEBI
"""Of a JSON file: eight times the size of the index of a model with 90,000 tensors."""
_MAX_LEVELS = 100
_TOO_DEEP = "its brackets are nested too deep"
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of flock on some file systems


def kind_of(path: Path, *, follow: bool = False) -> str:
    """What `path` is: a file | a folder | a link | a pipe | a device or socket; empty if nothing is there.

    follow: what a link leads to, instead of "a link" (but for one that leads to itself).
    """
    try:
        mode = path.stat(follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a link"
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """A descriptor of the regular file at `path`. Never waits for a pipe; follows a link only if `follow`.

    flags: as for os.open. Raises OSError as os.open does, and UserError for anything but a regular file.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError:
        if kind_of(path) not in ("", "a file", "a link" if follow else ""):
            raise _not_regular(path, follow) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path, follow)
    return descriptor


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError raised in the block: errors of write, flush and lock name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _not_regular(path: Path, follow: bool) -> UserError:
    return UserError(f"{path}: is {kind_of(path, follow=follow)}, where a regular file is needed; remove it")


class Lock:
    """An open file, locked against other processes until `close`, or the end of the process.

    why_not: why the file system has no locks, and nothing is locked; otherwise empty.
    """

    def __init__(
        self,
        path: Path,
        flags: int = os.O_RDWR | os.O_CREAT,
        *,
        mode: int = 0o666,
        wait: bool = False,
        follow: bool = False,
        shared: bool = False,
    ) -> None:
        """flags, mode, follow: as for `open_regular`. shared: only an exclusive lock is in the way.

        Raises BlockingIOError if another process holds the lock, unless `wait`; OSError with the name of the
        file, and UserError, as `open_regular` does.
        """
        self.descriptor, self.why_not = open_regular(path, flags, mode, follow=follow), ""
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            with named(path):
                fcntl.flock(self.descriptor, how)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                self.close()
                raise
            self.why_not = os.strerror(error.errno)

    def close(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldFolder:
    """A folder that is kept open: `check` raises if its path no longer leads to it.

    The open descriptor keeps the inode in use, so that no other folder can get the same number.
    """

    def __init__(self, path: Path) -> None:
        """Opens the folder. Raises OSError where `path` is not a folder."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raises UserError where the folder was removed, renamed, replaced or unmounted."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        raise UserError(
            f"output_dir: {self.path} was removed, renamed or unmounted while the run was writing there; put "
            "it back and run again"
        )

    def close(self) -> None:
        """Closes the descriptor. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
    """Writes `value` as indented JSON in ASCII, which holds every text that JSON can hold, by `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def write_errors(where: str, todo: str) -> Iterator[None]:
    """An OSError of the block is a UserError: `where` cannot be written, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{where} cannot be written: {error.strerror or error}; {todo}") from None


def read_text(path: Path, max_chars: int, encoding: str = "utf-8") -> str:
    """The text of the file at `path`.

    Raises OSError and UnicodeDecodeError as `Path.read_text` does, and ValueError for a file that is longer
    than `max_chars` or not regular: reading a pipe would wait, and /dev/zero has no end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder is an OSError by itself
        raise ValueError("it is not a regular file")
    with path.open(encoding=encoding) as file:
        text = file.read(max_chars + 1)
    if len(text) > max_chars:
        raise ValueError(f"it is longer than {max_chars:,} characters, so it is something else")
    return text


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


class LongLineError(ValueError):
    """A line has more bytes than any real one."""


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """The lines of `file`, each with its line feed. Raises LongLineError for one of more than `max_bytes`,
    of which no more is read.
    """
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise LongLineError(f"is longer than {max_bytes:,} bytes")
        yield line


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
