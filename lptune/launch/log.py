"""Logs: rank 0 prints to the console, every other rank to a file of its own, OUTPUT_DIR/logs/rank-N.log.
Tracebacks of lost connections, which explain little, are written to one of rank 0, too (watch.py).

The file descriptors are redirected, so that output of NCCL, gloo or an aborting C++ runtime is caught as
well. This begins before the recipe is imported, when it is not yet known whether the run's folder may be
made. So the file first lies in the launcher's temporary folder. `keep_log` moves it to the run's folder once
that exists; the open descriptors stay valid. For recipes that never call `keep_log`, the launcher calls
`move_logs`. A file grows from launch to launch; a header marks where each launch begins.
"""

import contextlib
import errno
import os
import shutil
import socket
import time
from pathlib import Path
from typing import BinaryIO

from lptune.base.errors import UserError
from lptune.base.files import open_regular

LOGS = "LPTUNE_LOGS"  # folder of logs before the run's folder exists; unset: no redirection


def redirect_output() -> None:
    """Redirects stdout and stderr of this rank to its log. Rank 0, and a rank without a log, keep theirs."""
    folder, rank = os.environ.get(LOGS), os.environ["RANK"]
    if folder is None or rank == "0" or not os.path.isdir(folder):  # a folder of another launch
        return
    path = Path(folder, f"rank-{rank}.log")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    header = (
        f"--- {now} rank {rank} of {os.environ['WORLD_SIZE']} on {socket.gethostname()}, pid {os.getpid()}\n"
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(header)
        file.flush()
        _point_streams_to(file.fileno())


def keep_log(folder: Path) -> None:
    """Moves this rank's log, if it has one and if possible, to `folder`; the rank goes on writing there."""
    temporary = Path(os.environ.get(LOGS, os.devnull), f"rank-{os.environ.get('RANK')}.log")
    if not temporary.is_file():
        return
    with contextlib.suppress(OSError, UserError):
        folder.mkdir(exist_ok=True)
        with temporary.open("rb") as before, _append(folder, temporary.name) as after:
            shutil.copyfileobj(before, after)
            after.flush()
            _point_streams_to(after.fileno())
            shutil.copyfileobj(before, after)  # what another thread has written meanwhile
        temporary.unlink()


def move_logs(folder: Path, to: Path | None) -> Path | None:
    """Appends the logs that hold more than a header to those in `to`; returns the folder they are in.

    If that is impossible (no `to`, or it is not writable), the logs stay where they are.
    """
    logs = [log for log in sorted(folder.glob("rank-*.log")) if _says_something(log)]
    if not logs or to is None:
        return folder if logs else None
    try:
        to.mkdir(parents=True, exist_ok=True)
        for log in logs:
            with log.open("rb") as before, _append(to, log.name) as after:
                shutil.copyfileobj(before, after)
    except (OSError, UserError):
        return folder
    return to


def _says_something(log: Path) -> bool:
    with log.open("rb") as lines:
        return len([line for line, _ in zip(lines, range(2), strict=False)]) > 1


def _append(folder: Path, name: str) -> BinaryIO:
    """Opens the log `name` in `folder`, to write at its end. Raises OSError or UserError for a link, a pipe,
    a device or a folder: other people may have prepared the run's folder.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    return os.fdopen(open_regular(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "ab")


def _point_streams_to(descriptor: int) -> None:
    for stream in (1, 2):
        os.dup2(descriptor, stream)
