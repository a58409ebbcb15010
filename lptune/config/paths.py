"""Paths that other people may have prepared: what may be opened, and whether two paths are one place.

Paths are compared by device and inode, never as text: a link, a `..`, another spelling, and a bind mount of
the place or of a folder above it all count as the same place. A bind mount of something inside the place is
not recognised. A file is opened without following a link in the last part of its path, and a pipe is refused
without waiting for it.
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

RUN_FILES = (
    ".lock",
    "config.yaml",
    "metrics.jsonl",
    "precision_plan.json",
    "shadow.jsonl",
    "export.json",
    "reference.safetensors",
    "run.json",
    "samples.jsonl",
    "report.html",
)
RUN_FOLDERS = ("checkpoints", "export", "logs", "tensorboard", "wandb")
"""Names that a run writes in OUTPUT_DIR."""
TEMPORARY = ".tmp-"
"""Prefixes of the temporary names under which these are written or removed, in the same folder."""

_WRITTEN_AS_DATA = (
    "metrics.jsonl",
    "precision_plan.json",
    "shadow.jsonl",
    "run.json",
    "samples.jsonl",
    "export.json",
    "checkpoints/step-00000001/state.json",
    "checkpoints/step-00000001/manifest.json",
    "export/config.json",
)
"""Files of a run with suffixes that `data.source` reads."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of flock on some file systems
_PATHS = ("model.path", "teacher.path", "logits.folder", "data.source", "data.eval_source")
_HUB_REPOSITORIES = ("models--", "datasets--", "spaces--")


def is_within(path: Path, place: Path) -> bool:
    """Whether `path` leads to `place` or to something in it. False if either does not exist."""
    try:
        found, real = place.stat(), path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a circle of links
        return False
    for part in (real, *real.parents):
        with suppress(OSError):
            if os.path.samestat(part.stat(), found):
                return True
    return False


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
        places = (line.split(" ")[4] for line in mounts)  # the kernel writes blanks and line ends as \ooo
        if real in (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place) for place in places):
            return True
    return os.path.ismount(real)


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


def lock_file(descriptor: int, *, wait: bool) -> str:
    """Locks an open file against other processes until it is closed. Returns an empty text, or, where the
    file system has no locks, the reason (nothing is locked then).

    Raises BlockingIOError if another process holds the lock, unless `wait`. The kernel releases the lock when
    the process ends.
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
    """Adds `path` to an OSError raised in the block: errors of write, flush and lock name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _not_regular(path: Path, follow: bool) -> UserError:
    return UserError(f"{path}: is {kind_of(path, follow=follow)}, where a regular file is needed; remove it")


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


def check_inputs_stay(cfg: Any) -> None:
    """Raises UserError if the run would write over its own input (model or data) in `output_dir`.

    cfg: a config with `output_dir`, and paths among the texts of `model`, `data` and, if it has them,
    `teacher` and `logits`. Reads no file.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    sections = [name for name in ("model", "teacher", "logits", "data") if hasattr(cfg, name)]
    for section in sections:
        for key, value in _texts(section, dataclasses.asdict(getattr(cfg, section))):
            for path in [*_paths(key, value), *_paths_to_come(key, value, output_dir)]:
                if _is_written(path, output_dir):
                    if key == "data.cache":
                        raise UserError(
                            f"data.cache: {path} is in output_dir ({cfg.output_dir}), where the run writes; "
                            "choose another"
                        )
                    is_model = key in ("model.path", "teacher.path")
                    what = f"the model in {key}" if is_model else f"{path}, which {key} names"
                    raise UserError(f"output_dir: {cfg.output_dir} would overwrite {what}; choose another")


def check_given_files_stay(cfg: Any, files: Iterable[Path]) -> None:
    """Raises UserError if the run would remove one of `files` (its config or its recipe) in `output_dir`.

    The config.yaml of a run may be one of them: a run that does not continue there renames it.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    for path in files:
        below = None
        with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
            below = _below(path, output_dir)
        if below and (below[0] in RUN_FOLDERS or below[0].startswith(TEMPORARY)):
            raise UserError(f"output_dir: {cfg.output_dir} would overwrite {path}; move that file away")


def _is_written(path: Path, output_dir: Path) -> bool:
    """Whether a run with this `output_dir` writes, renames or removes `path`, a folder above it, or files in
    it. Neither of the two needs to exist.
    """
    names = (*RUN_FILES, *RUN_FOLDERS)
    with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
        below = _below(path, output_dir)
        if below is not None and (not below or below[0] in names or below[0].startswith(TEMPORARY)):
            return True
    # The same file may also lie elsewhere: through a hard link, or another mount.
    places = [*(output_dir / name for name in names), *output_dir.glob(f"{TEMPORARY}*")]
    return any(is_within(path, place) for place in places)


def _below(path: Path, folder: Path) -> tuple[str, ...] | None:
    """The names on the way from `folder` to `path`; None if `path` is not below `folder`."""
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
    """The files that a text names, as a path or a glob; empty if it is not a path."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown home
        if key == "data.cache":  # the run makes it if it does not exist
            return [] if text in ("auto", "none") else [Path(text).expanduser()]
        if not text:
            return []
        path = Path(text).expanduser()
        if path.exists():
            return [path]
        if key in _PATHS or not set("\n{") & set(text):
            return [Path(found) for found in glob.glob(str(path), recursive=True)]
    return []


def _paths_to_come(key: str, text: str, output_dir: Path) -> list[Path]:
    """Files that the run will write and that the pattern `text` would match afterwards."""
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
    """Whether glob.glob finds the path `names` by `pattern`, where `**` stands for any number of folders."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    first = pattern[0]
    if names[0].startswith(".") and not first.startswith("."):
        return False
    if first == "**":
        return _fits(pattern[1:], names) or _fits(pattern, names[1:])
    return fnmatch.fnmatchcase(names[0], first) and _fits(pattern[1:], names[1:])


def check_model_files(folder: Path) -> None:
    """Raises UserError if anything in a model's folder is a link out of it, or not a file or folder."""
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if not path.name.isprintable():  # half a surrogate pair: bytes that are not UTF-8
                    raise UserError(f"{place}: holds a file whose name is {path.name!a}; rename it")
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    model_file(folder, path)


def model_file(folder: Path, path: Path) -> Path:
    """The real path of the file `path` of the model's folder. Raises UserError for a link out of the folder:
    files of a model are also exported and published, whatever their names are.

    The hub's cache is the exception, since its files are links:
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
