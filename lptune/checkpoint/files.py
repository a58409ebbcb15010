"""Folders that are published by a rename, after their bytes have reached the disk (files: base/files.py).

So a reader, or a run that resumes after a kill, sees a folder completely or not at all.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY, Lock, fsync_path, kind_of, named, open_regular


def num_threads() -> int:
    """Number of threads of this process for writing and hashing: its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


WRITE_ERRORS = (OSError, SafetensorError)
"""The exceptions of writing to a full or broken disk."""


def why(error: Exception) -> str:
    """The system's message of an error, with the file name if the error has one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file durably, with the read and write permissions of its folder."""
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes its files private (0600), but exports are shared. The folder's permissions follow the
    # umask. Reading the umask directly would mean setting it, for all threads.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_path(path)


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes; follows a link. Raises UserError if it is not a regular file."""
    with named(path), open(open_regular(path, os.O_RDONLY, follow=True), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(partial: Path, final: Path) -> None:
    """Makes the finished folder `partial` appear as `final`, which must not exist."""
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    fsync_path(partial)
    partial.rename(final)
    fsync_path(final.parent)


def remove_folder(folder: Path) -> None:
    """Removes a published folder, after a rename, so that no reader sees it incomplete. Follows no link."""
    if folder.is_symlink():
        folder.unlink()
        return
    partial = folder.with_name(f"{TEMPORARY}removed-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`."""
    return shutil.disk_usage(folder).free


def set_aside(folder: Path) -> Path:
    """Renames a file or folder to the first free name of `old-NAME-1`, -2, …; returns the new path."""
    number = 1
    while os.path.lexists(target := folder.with_name(f"old-{folder.name}-{number}")):
        number += 1
    return folder.rename(target)


def remove_leftover(path: Path) -> None:
    """Removes the file or folder that an interrupted write left at `path`, if any. Follows no link."""
    if kind_of(path) == "a folder":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Scratch:
    """A new folder beside `final`, which is filled and then published as `final` by a rename.

    Its name is `.tmp-NAME-` and a random number, so that several processes can write the same `final`; the
    first rename wins. The folder contains a locked file while its process lives. If that file is not locked,
    a kill left the folder, and the next writer beside it removes it. One for another `final` must be a day
    old, too: where locks hold on one machine only, another machine may be writing it. Folders without that
    file are never touched.
    """

    MARK = ".lptune-scratch"
    _OLD_S = 24 * 3600

    def __init__(self, final: Path, number: int | None = None) -> None:
        """number: of a folder that another process has made. None: makes a new folder."""
        self._lock: Lock | None = None
        if number is not None:
            self.number = number
        else:
            self.number = secrets.randbits(48)
            self._remove_leftovers(final)
        self.path = final.with_name(f"{TEMPORARY}{final.name}-{self.number:012x}")
        if number is None:
            self.path.mkdir()
            unlocked = self.path / f"{self.MARK}-new"
            # Without locks, no writer takes another's folder for a leftover.
            self._lock = Lock(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            unlocked.rename(self.path / self.MARK)

    def unmark(self) -> None:
        """Removes the mark; call it before the folder is published, because exports do not contain it."""
        (self.path / self.MARK).unlink()

    def remove(self) -> None:
        """Removes the folder, if it was not published, and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _remove_leftovers(self, final: Path) -> None:
        for path in final.parent.glob(f"{TEMPORARY}*"):
            found = re.fullmatch(f"{re.escape(TEMPORARY)}(.*)-[0-9a-f]{{12}}", path.name, re.DOTALL)
            if found is None or kind_of(path) != "a folder":
                continue
            with suppress(OSError, UserError), Lock(path / self.MARK, os.O_RDWR) as lock:
                is_old = time.time() - path.stat().st_mtime > self._OLD_S
                if (found[1] == final.name or is_old) and not lock.why_not:
                    shutil.rmtree(path)
