"""Object storage by its address (`s3://…`, `gs://…`, `abfs://…`), through fsspec; also a disk (`file://…`).

Object storage has no rename, by which a folder is published on a disk, but an object is written whole or not
at all. So one object of a folder is its seal: removed before anything else there is written or removed, and
written last. After a kill at any moment a folder has its seal and is whole, or has none. A disk may hold a
part of a file, so there a seal is renamed into place.

Each of fsspec's file systems has exceptions of its own. Here all become a StorageError.
"""

import errno
import hashlib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lptune.base.cores import in_threads
from lptune.base.errors import UnavailableError, UserError, command_to_install
from lptune.base.files import MEBI, TEMPORARY, fsync_path

_AT_ONCE = 2
"""Files that a process copies at the same time. s3fs divides each by itself, and holds half a GB of it."""
_MAX_BYTES = 1024 * MEBI
"""Of an object that is read as a whole, if its reader says nothing else: far above any manifest."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
"""What fsspec needs for a protocol."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BUSY = (errno.EBUSY, errno.EIO)
"""What s3fs makes of the storage's own failures (500, 503)."""
_NO_ANSWER = {"ConnectionError", "TimeoutError", "HTTPClientError", "ClientConnectionError"}
"""Names of classes, of the standard library and of what fsspec's file systems are built on."""


class StorageError(UserError):
    """The storage has refused something. The message names the object and the reason."""


class NoAnswerError(StorageError, UnavailableError):
    """The storage, or the way to it, does not work now."""


class Storage:
    """What is at an address (`s3://bucket/runs/8b`). Names are relative to it. Methods raise StorageError."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        protocol = address.partition(":")[0]
        options = {"auto_mkdir": True} if protocol == "file" else {}  # storage has no folders to make
        with self._named(""):
            try:
                from fsspec.core import url_to_fs
                from fsspec.implementations.local import LocalFileSystem

                self._files, root = url_to_fs(address, **options)
            except ImportError as error:
                if (package := _PACKAGES.get(protocol)) is None:
                    raise
                raise StorageError(f"{address}: needs {package}; {command_to_install([package])}") from error
        self._root = str(root).rstrip("/")
        self._is_disk = isinstance(self._files, LocalFileSystem)

    def sizes(self, place: str = "") -> dict[str, int]:
        """The names of all objects in `place`, relative to it, and their sizes in bytes; none if nothing is
        there.
        """
        root = self._path(place).rstrip("/")
        with self._named(place):
            self._files.invalidate_cache()
            found = self._files.find(root, detail=True)
        return {path.removeprefix(f"{root}/"): int(about["size"]) for path, about in found.items()}

    def sha256(self, name: str) -> str:
        """Hex digest of an object, which is read as a stream; empty if there is none."""
        path = self._path(name)
        with (
            suppress(FileNotFoundError),
            self._named(name, missing_too=False),
            self._files.open(path, "rb") as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()
        return ""

    def put(self, place: str, folder: Path, names: Iterable[str]) -> None:
        """Copies the files `names` of `folder` to `place`."""

        def put(name: str) -> None:
            with self._named(f"{place}/{name}"):
                self._files.put_file(str(folder / name), self._path(f"{place}/{name}"))

        in_threads([partial(put, name) for name in names], _AT_ONCE)

    def get(self, place: str, folder: Path, names: Iterable[str]) -> None:
        """Copies the objects `names` in `place` to new files in `folder`, durably; leaves out those that are
        missing. Raises UserError where the disk is full.
        """

        def get(name: str) -> None:
            file, object_name = folder / name, f"{place}/{name}".lstrip("/")
            try:
                with self._named(object_name, missing_too=False, here=file):
                    self._files.get_file(self._path(object_name), str(file))
                fsync_path(file)
            except FileNotFoundError:
                file.unlink(missing_ok=True)

        in_threads([partial(get, name) for name in names], _AT_ONCE)

    def read(self, name: str, max_bytes: int | None = _MAX_BYTES) -> bytes | None:
        """The content of an object, at most `max_bytes` of it (None: all); None if there is none."""
        # From 0, or the size would be asked for first: a store that refuses that gives no reason.
        with suppress(FileNotFoundError), self._named(name, missing_too=False):
            return bytes(self._files.cat_file(self._path(name), start=0, end=max_bytes))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, which has its old content or the new after a kill."""
        folder, _, last = self._path(name).rpartition("/")
        first = f"{folder}/{TEMPORARY}{secrets.token_hex(4)}-{last}" if self._is_disk else self._path(name)
        with self._named(name):
            self._files.pipe_file(first, content)
            if self._is_disk:
                self._files.mv(first, self._path(name))

    def rename(self, name: str, other: str) -> None:
        """Renames an object, in place of one that has the name `other`."""
        with self._named(name):
            self._files.mv(self._path(name), self._path(other))

    def remove(self, place: str, seal: str | None = None) -> None:
        """Removes `place` and all that is in it, the object `seal` first. Does nothing if it is not there."""
        for name in [f"{place}/{seal}"] if seal else []:
            with self._named(name), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))
        with self._named(place), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            self._files.rm(self._path(place), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _named(self, name: str, *, missing_too: bool = True, here: Path | None = None) -> Iterator[None]:
        """Makes a StorageError of any exception: fsspec's file systems have no class of errors in common.
        missing_too: also of FileNotFoundError. here: the file to write; where its disk is full, a UserError.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) or (isinstance(error, FileNotFoundError) and not missing_too):
                raise
            if here and isinstance(error, OSError) and error.errno in _FULL:
                raise UserError(
                    f"output_dir: {here}: {error.strerror}; make room there and run again"
                ) from None
            # Without the file's name: a copy to a full disk names the file that was read.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            what = f"{self.address}/{name}".rstrip("/")
            names = {cls.__name__ for cls in type(error).__mro__}
            no_answer = names & _NO_ANSWER or getattr(error, "errno", None) in _BUSY
            cls = NoAnswerError if no_answer else StorageError
            raise cls(f"{what}: {reason.rstrip('.')}") from error
