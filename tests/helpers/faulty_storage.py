"""A storage of fsspec that fails as storage does: `faulty:///folder` is that folder of a disk.

Every call that writes, reads, lists or removes asks `Faulty.fault` first, with the name of the call and the
path. A process that is started with FAULTY="SIGNAL:CALL:PART" sends itself the signal in the middle of the
first such call whose path contains PART: half of a file has been written then.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

PLAN = "FAULTY"


def none(call: str, path: str) -> None:
    """No fault."""


def planned(call: str, path: str) -> None:
    """The fault that the environment names."""
    name, wanted, part = os.environ.get(PLAN, "::").split(":")
    if name and call == wanted and part in path:
        os.kill(os.getpid(), signal.Signals[name])


class Faulty(LocalFileSystem):
    """The disk, whose calls may fail."""

    protocol = "faulty"
    fault: ClassVar[Callable[[str, str], None]] = staticmethod(planned)

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:  # type: ignore[override]
        """Half of the file, the fault, the whole file: what a disk may show."""
        content = Path(lpath).read_bytes()
        self._half(rpath, content)
        self.fault("put", rpath)
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:  # type: ignore[override]
        """As `put_file`."""
        self._half(path, value)
        self.fault("put", path)
        super().pipe_file(path, value, **options)

    def _half(self, path: str, content: bytes) -> None:
        file = Path(self._strip_protocol(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content[: len(content) // 2])

    def mv(self, path1: str, path2: str, **options: Any) -> None:  # type: ignore[override]
        """The fault, then the rename."""
        self.fault("mv", path2)
        super().mv(path1, path2, **options)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:  # type: ignore[override]
        """The fault, then the file."""
        self.fault("get", rpath)
        super().get_file(rpath, lpath, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        """The fault, then the names."""
        self.fault("list", path)
        return super().find(path, *args, **options)

    def rm_file(self, path: str) -> None:
        """The fault, then the file is gone."""
        self.fault("rm", path)
        super().rm_file(path)

    def rm(self, path: Any, *args: Any, **options: Any) -> None:
        """One file, the fault, then all files: what a kill in the middle leaves."""
        inside = sorted(file for file in Path(path).rglob("*") if file.is_file())
        for file in inside[:1]:
            file.unlink()
        self.fault("rm", path)
        super().rm(path, *args, **options)


fsspec.register_implementation("faulty", Faulty, clobber=True)
