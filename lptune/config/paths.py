"""Paths that others prepared: what may be opened there, and whether two paths are one place.

Paths are compared by what they lead to (device and inode), never as text: a link, a `..`, another spelling
and a bind mount of the place or of a folder above it are all the same place. A bind mount of something within
the place is not recognised. Files are opened without following a link in their last part and without waiting
for a pipe.
"""

import dataclasses
import errno
import fcntl
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lptune.config.errors import UserError

RUN_FILES = (".lock", "config.yaml", "metrics.jsonl", "precision_plan.json", "export.json")
RUN_FOLDERS = ("checkpoints", "export", "logs", "tensorboard")
"""What a run writes in OUTPUT_DIR."""
TEMPORARY = ".tmp-"
"""How the names begin under which these are written, or removed, beside their place."""

_WRITTEN_AS_DATA = (
    "metrics.jsonl",
    "precision_plan.json",
    "export.json",
    "checkpoints/step-00000001/state.json",
    "checkpoints/step-00000001/manifest.json",
    "export/config.json",
)
"""Files of a run with suffixes that `data.source` reads."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # what some file systems answer to flock
_HUB_REPOSITORIES = ("models--", "datasets--", "spaces--")


def is_within(path: Path, place: Path) -> bool:
    """Whether `path` leads to `place` or to something in it. False where one of them does not exist."""
    try:
        found, real = place.stat(), path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a circle of links
        return False
    for part in (real, *real.parents):
        with suppress(OSError):
            if os.path.samestat(part.stat(), found):
                return True
    return False


def kind_of(path: Path) -> str:
    """What stands at `path`: a file | a folder | a link | a pipe | a device or socket; empty: nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted at `path`: a file system, or a folder of the same one (a bind mount).

    Such a folder can be neither renamed nor replaced by a rename.
    """
    if not path.is_dir():
        return False
    real = os.path.realpath(path)
    with (
        suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts,
    ):
        places = (line.split(" ")[4] for line in mounts)  # blanks and line ends in them are written as \ooo
        if real in (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place) for place in places):
            return True
    return os.path.ismount(real)


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """A descriptor of the regular file at `path`. Follows no link, unless `follow`, and waits for no pipe.

    flags: of os.open. follow: follow a link at `path`. Raises OSError as os.open does, and UserError for what
    is no regular file.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError:
        if kind_of(path) not in ("", "a file", "a link" if follow else ""):
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def lock_file(descriptor: int, *, wait: bool) -> str:
    """Keeps other processes out of an open file until it is closed. Returns why its file system has no locks,
    empty where it has: the file is then held.

    Raises BlockingIOError where another process holds it, unless `wait`. The kernel drops the lock with the
    process.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return os.strerror(error.errno)
        raise
    return ""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError within says that it is about `path`; that of a write, a flush or a lock names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _not_regular(path: Path) -> UserError:
    return UserError(f"{path}: is {kind_of(path)}, where a regular file is needed; remove it")


class HeldFolder:
    """A folder that was open from the start: `check` tells whether its path still leads to it.

    The descriptor keeps the inode, so that no later folder can have the same one.
    """

    def __init__(self, path: Path) -> None:
        """OSError where there is no folder at `path`."""
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
        """Lets go of the folder; the second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_inputs_stay(cfg: Any) -> None:
    """Refuses an `output_dir` in which the run would write over what it reads: its model or its data.

    cfg: a config with `output_dir`, and paths among the texts of `model` and `data`. Reads no file.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    for section in ("model", "data"):
        for key, value in _texts(section, dataclasses.asdict(getattr(cfg, section))):
            for path in [*_paths(key, value), *_paths_to_come(key, value, output_dir)]:
                if _is_written(path, output_dir):
                    if key == "data.cache":
                        raise UserError(
                            f"data.cache: {path} is in output_dir ({cfg.output_dir}), where the run writes; "
                            "choose another"
                        )
                    what = "the model in model.path" if key == "model.path" else f"{path}, which {key} names"
                    raise UserError(
                        f"output_dir: {cfg.output_dir} would be written over {what}; choose another"
                    )


def check_given_files_stay(cfg: Any, files: Iterable[Path]) -> None:
    """Refuses an `output_dir` in which the run would remove one of `files`, its config or its recipe.

    The run's own config.yaml may be given: a run that continues nothing there sets it aside.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    for path in files:
        below = _below(path, output_dir)
        if below and (below[0] in RUN_FOLDERS or below[0].startswith(TEMPORARY)):
            raise UserError(f"output_dir: {cfg.output_dir} would be written over {path}; move that file away")


def _is_written(path: Path, output_dir: Path) -> bool:
    """Whether a run writes, renames or removes `path`, something that it lies in, or, of a folder of data,
    files in it. Neither of the two need be there.
    """
    names = (*RUN_FILES, *RUN_FOLDERS)
    with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
        below = _below(path, output_dir)
        if below is not None and (not below or below[0] in names or below[0].startswith(TEMPORARY)):
            return True
    # What is there may be elsewhere, too: a hard link, or another mount of it.
    places = [*(output_dir / name for name in names), *output_dir.glob(f"{TEMPORARY}*")]
    return any(is_within(path, place) for place in places)


def _below(path: Path, folder: Path) -> tuple[str, ...] | None:
    """The names that lead from `folder` to `path`; None where they do not."""
    path, folder = path.resolve(), folder.resolve()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    missing = folder.relative_to(there).parts
    for part in (path, *path.parents):
        if part.exists() and part.samefile(there):
            names = path.relative_to(part).parts
            return names[len(missing) :] if names[: len(missing)] == missing else None
    return None


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(key if name == key.rpartition(".")[2] else f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(key, item)


def _paths(key: str, text: str) -> list[Path]:
    """The files that a text names, as a path or a pattern of paths; none where it is no path."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown home
        if key == "data.cache":  # which is made where it is not there
            return [] if text in ("auto", "none") else [Path(text).expanduser()]
        if not text:
            return []
        path = Path(text).expanduser()
        if path.exists():
            return [path]
        if key in ("model.path", "data.source", "data.eval_source") or not set("\n{") & set(text):
            return [Path(found) for found in glob.glob(str(path), recursive=True)]
    return []


def _paths_to_come(key: str, text: str, output_dir: Path) -> list[Path]:
    """The files that the run will write and that a pattern would match from then on."""
    if key not in ("data.source", "data.eval_source") or not glob.has_magic(text):
        return []
    with suppress(OSError, ValueError, RuntimeError):
        parts = Path(text).expanduser().absolute().parts
        num_plain = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        above, folder = Path(*parts[:num_plain]).resolve(), output_dir.resolve()
        if folder == above or above in folder.parents:
            written = [folder / name for name in _WRITTEN_AS_DATA]
            return [path for path in written if _fits(parts[num_plain:], path.relative_to(above).parts)]
    return []


def _fits(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether glob.glob would find the path `names` by `pattern`, with `**` for any number of folders."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    first = pattern[0]
    if names[0].startswith(".") and not first.startswith("."):
        return False
    if first == "**":
        return _fits(pattern[1:], names) or _fits(pattern, names[1:])
    return fnmatch.fnmatchcase(names[0], first) and _fits(pattern[1:], names[1:])


def check_model_files(folder: Path) -> None:
    """Refuses a model's folder in which something leads out of it, or is neither a file nor a folder."""
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    model_file(folder, path)


def model_file(folder: Path, path: Path) -> Path:
    """Where the file `path` of the model's folder `folder` lies. What is read from a model is also exported
    and published, so a link that leads out of the folder is refused, whatever its name is.

    The hub's cache is the exception, its files being links:
    models--OWNER--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH.
    """
    home = folder.resolve()
    homes = [home]
    for parent in home.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith(_HUB_REPOSITORIES):
            homes.append(parent.parent / "blobs")
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a circle of links
        raise UserError(f"{path}: is a link to nowhere; download the checkpoint again") from None
    if not any(target.is_relative_to(place) for place in homes):
        raise UserError(f"{path}: is a link to {target}, out of the folder; copy the file here")
    if not (target.is_file() or target.is_dir()):
        raise UserError(f"{path}: is {kind_of(target)}, where a model has files; remove it")
    return target
