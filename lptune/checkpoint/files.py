"""Folders that are published by a rename, after their bytes have reached the disk (files: base/files.py).

So a reader, or a run that resumes after a kill, sees a folder completely or not at all.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lptune.base.cores import num_cores
from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY, Lock, fsync_path, kind_of, named, open_regular


def num_threads() -> int:
    """Number of threads of this process for writing and hashing: its share of the machine's cores."""
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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

    It contains a locked file while its process lives. If that file is not locked, a kill left the folder, and
    the next writer of `final` removes it. A folder that is being made or published has no such file either,
    so both are done `alone`.
    """

    MARK = ".lptune-scratch"

    def __init__(self, final: Path) -> None:
        """Raises UserError if another process is writing `final`, OSError if the folder cannot be made."""
        self.path = self.path_of(final)
        with self.alone():
            try:
                with suppress(FileNotFoundError), Lock(self.path / self.MARK, os.O_RDWR):
                    pass
            except BlockingIOError:
                line = f"{final}: another process is writing it; wait for it, or choose another folder"
                raise UserError(line) from None
            remove_leftover(self.path)
            self.path.mkdir()
            self._made = self.path.stat()
            self._lock = Lock(self.path / self.MARK)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other process makes or publishes a folder in the same place."""
        descriptor = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks of folders
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @staticmethod
    def path_of(final: Path) -> Path:
        """The path of the folder, for other ranks, too."""
        return final.with_name(f"{TEMPORARY}{final.name}")

    def unmark(self) -> None:
        """Removes the mark, which exports do not contain; call it, and publish the folder, `alone`."""
        (self.path / self.MARK).unlink()

    def remove(self) -> None:
        """Removes the folder, if it was not published, and releases the lock."""
        with suppress(OSError), self.alone():  # it is gone after it was published, or another process's
            if os.path.samestat(self._made, self.path.stat()):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
