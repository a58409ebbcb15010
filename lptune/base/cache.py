"""Files that are kept between runs, in `$XDG_CACHE_HOME/lptune` (`~/.cache/lptune`).

Such a file is executed, or decides which code runs or which tokens are trained on. So it must be a regular
file, not a link, owned by this user or root, and not writable by other users. Any other file counts as
missing: a warning names it, and the caller makes it again.
"""

import logging
import os
import stat
import tempfile
from pathlib import Path

from lptune.base.files import write_bytes

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024**2


def folder() -> Path:
    """The folder of the files. XDG_CACHE_HOME counts only if it is absolute, as its specification says."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):
        return Path(home, "lptune")
    try:
        return Path.home() / ".cache" / "lptune"
    except RuntimeError:  # a user without an entry in the password database
        return Path(tempfile.gettempdir(), f"lptune-{os.geteuid()}")


def read(path: Path) -> bytes | None:
    """The content of a file; None if it is missing, or (with a warning) not safe to use.

    Raises OSError if it cannot be read.
    """
    try:
        # Non-blocking: otherwise open() waits for a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if problem := _problem(os.fstat(descriptor)):
            logger.warning("%s is not used: %s", path, problem)
            return None
        return file.read(MAX_BYTES)


def write(path: Path, content: bytes) -> None:
    """Writes the file to disk under a temporary name, then renames it to `path`. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file():  # a pipe, say, which `read` has refused
        path.unlink(missing_ok=True)
    write_bytes(path, content, mode=0o600, shared=True)  # several ranks measure at once


def _problem(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return "" if found.st_size < MAX_BYTES else f"it has {found.st_size:,} bytes"
