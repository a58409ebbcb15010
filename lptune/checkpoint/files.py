"""Durable writes: a file or folder is published by renaming it, after its bytes have reached the disk.

A reader (or a run that resumes after a kill) therefore sees a thing whole or not at all.
"""

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lptune.config import MEBI, TEMPORARY, UserError, kind_of, lock_file, named, open_regular, read_text


def fsync_path(path: Path) -> None:
    """Flushes a file's data or a folder's entries to disk."""
    with named(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def num_threads() -> int:
    """Threads of this process for writing and hashing: its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


WRITE_ERRORS = (OSError, SafetensorError)
"""What writing raises where a disk is full or broken."""


def why(error: Exception) -> str:
    """What happened, in the system's words, and where it says so."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, durably, with the permissions of its folder."""
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes its file private (0600), and an export is there to be shared. Its folder was made by
    # the umask; asking for that itself means to change it, for every thread.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_path(path)


def write_text(path: Path, text: str) -> None:
    """Writes `text` durably; `path` holds the old content or the new, never a part. No link is followed."""
    partial = path.with_name(f"{TEMPORARY}{path.name}")
    with named(partial):
        with suppress(FileNotFoundError):  # a kill's leftover, or what somebody put there
            partial.unlink()
        with open(open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            file.write(text)
    fsync_path(partial)
    partial.replace(path)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, max_chars: int = 64 * MEBI) -> Any:
    """The JSON at `path`; UserError names file, line and problem.

    max_chars: by default eight times the index of a model of 90,000 tensors.
    """
    try:
        return json.loads(read_text(path, max_chars))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text, as JSON is") from None
    except RecursionError:
        raise UserError(f"{path}: cannot be read: its brackets are nested too deep") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        what = "a number in it is too long" if "integer string" in str(error) else error
        raise UserError(f"{path}: cannot be read: {what}") from None


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The bytes of the file at `path`, of which there may be `max_bytes`."""
    try:
        with _open(path) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: is larger than {max_bytes:,} bytes, so it is something else")
    return content


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes, or of a link's target. UserError for what is no regular file."""
    with named(path), _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> BufferedReader:
    """A regular file, or a link to one, as in the hub's cache; no pipe, for which it would wait."""
    return open(open_regular(path, os.O_RDONLY, follow=True), "rb")


def publish_folder(partial: Path, final: Path) -> None:
    """Makes the finished folder `partial` appear as `final`, which must not exist."""
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    fsync_path(partial)
    partial.rename(final)
    fsync_path(final.parent)


def remove_folder(folder: Path) -> None:
    """Removes a published folder, which is whole until it is gone. A symbolic link goes, not its target."""
    if folder.is_symlink():
        folder.unlink()
        return
    partial = folder.with_name(f"{TEMPORARY}removed-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def free_bytes(folder: Path) -> int:
    """What may be written there."""
    return shutil.disk_usage(folder).free


def set_aside(folder: Path) -> Path:
    """Renames a folder out of the way, as `old-NAME-1`, -2, …; returns its new path. Nothing is deleted."""
    number = 1
    while os.path.lexists(target := folder.with_name(f"old-{folder.name}-{number}")):
        number += 1
    return folder.rename(target)


def remove_leftover(path: Path) -> None:
    """Removes what an interrupted write left at `path`, if anything. A link goes, not its target."""
    if kind_of(path) == "a folder":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fresh_folder(path: Path) -> Path:
    """An empty folder at `path`, whose parent exists; what an interrupted write left there is removed."""
    remove_leftover(path)
    path.mkdir()
    return path


class Scratch:
    """A new folder beside `final`, in which `final` is written before it is published by a rename.

    Its name is `.tmp-NAME-` and a random number, so that several processes may write the same `final`: the
    first rename wins. A locked file in it tells the folder of a live process from what a kill left, which the
    next writer removes. Folders without that file are not touched, whatever they are called.
    """

    MARK = ".lptune-scratch"

    def __init__(self, final: Path, number: int | None = None) -> None:
        """number: of a folder that another process has made; None: make one."""
        self._lock: int | None = None
        if number is not None:
            self.number = number
        else:
            self.number = secrets.randbits(48)
            self._remove_leftovers(final)
        self.path = final.with_name(f"{TEMPORARY}{final.name}-{self.number:012x}")
        if number is None:
            self.path.mkdir()
            unlocked = self.path / f"{self.MARK}-new"
            self._lock = open_regular(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with suppress(OSError):  # without a lock the next writer removes what a kill leaves here
                lock_file(self._lock, wait=False)
            unlocked.rename(self.path / self.MARK)

    def unmark(self) -> None:
        """Before the folder is published: from now on it looks like anybody's."""
        (self.path / self.MARK).unlink()

    def remove(self) -> None:
        """Removes the folder, unless it was published."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_leftovers(self, final: Path) -> None:
        for path in final.parent.glob(f"{TEMPORARY}{glob.escape(final.name)}-*"):
            if re.fullmatch("[0-9a-f]{12}", path.name[-12:]) and kind_of(path) == "a folder":
                with suppress(OSError, UserError):
                    lock = open_regular(path / self.MARK, os.O_RDWR)
                    try:
                        if not lock_file(lock, wait=False):
                            shutil.rmtree(path)
                    finally:
                        os.close(lock)
