"""What an adversary can put where a file or a folder is expected."""

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from tests.faults.adversary.place import Place


class NotHere(Exception):  # noqa: N818
    """This machine or user cannot lay such an attack."""


Put = Callable[[Path, Place], object]


def _socket(path: Path, place: Place) -> None:
    # Its address has at most 108 bytes.
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


def _device(path: Path, place: Place) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # /dev/full
    except PermissionError:
        raise NotHere from None


def _huge(path: Path, place: Place) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 27)


def _folder(path: Path, place: Place) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def _of_another_user(path: Path, place: Place) -> None:
    path.write_text("theirs")
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        raise NotHere from None


def _mode(mode: int) -> Put:
    def put(path: Path, place: Place) -> None:
        path.write_text("mine")
        path.chmod(mode)

    return put


THINGS: dict[str, Put] = {
    "link to a file": lambda path, place: path.symlink_to(place.victim / "file"),
    "relative link to a file": lambda path, place: path.symlink_to(
        os.path.relpath(place.victim / "file", path.parent)
    ),
    "link to a folder": lambda path, place: path.symlink_to(place.victim / "folder"),
    "link through a link": lambda path, place: (
        (place.folder / "hop").symlink_to(place.victim / "file"),
        path.symlink_to(place.folder / "hop"),
    ),
    "link to nowhere": lambda path, place: path.symlink_to(place.victim / "none"),
    "link to itself": lambda path, place: path.symlink_to(path),
    "link to /dev/full": lambda path, place: path.symlink_to("/dev/full"),
    "hard link": lambda path, place: path.hardlink_to(place.victim / "file"),
    "pipe": lambda path, place: os.mkfifo(path),
    "socket": _socket,
    "device": _device,
    "empty file": lambda path, place: path.touch(),
    "file": lambda path, place: path.write_text("mine"),
    "huge file": _huge,
    "file that nobody may read": _mode(0),
    "file that all may write": _mode(0o666),
    "file of another user": _of_another_user,
    "empty folder": lambda path, place: path.mkdir(),
    "folder": _folder,
}


def put(thing: str, path: Path, place: Place) -> None:
    """Puts it at `path`, in the place of whatever is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    THINGS[thing](path, place)
