"""Outcomes: every rank writes how it ends, in a folder of its launcher, before other ranks can notice.

An exit code does not say which rank failed first. When a rank fails, other ranks fail with connection errors,
often before the process of the first one is gone. So a failing rank writes its outcome while its connections
are open, and keeps them open (`hold`) until the launcher, which reads the folder ten times a second, has told
the other machines and ends all ranks. So the cause is written before its first consequence. Only a rank that
is killed cannot do that; errors that look like a lost peer are marked, so that the report of the launcher of
the killed rank counts for more.
"""

import json
import os
import re
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lptune.launch.log import LOGS

OUTCOMES = "LPTUNE_OUTCOMES"  # folder for outcomes; set by the launcher for its ranks
LAUNCHER = "LPTUNE_LAUNCHER_PID"
ERROR_LINE = "LPTUNE_ERROR_LINE"  # file for the line of the error that ends a command; set by a sweep
LEAVING = (0, 130, 143)  # done, KeyboardInterrupt, stopped by a signal: not failures
_HOLD_S = 15.0  # the launcher needs about one second, see lptune/launch/watch.py
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|remote process exited|socket"
    r"|nccl communicator was aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)


class Rank(NamedTuple):
    """What a rank announces when it starts."""

    rank: int
    pid: int
    num_local: int
    """Number of ranks on this machine."""


class Outcome(NamedTuple):
    """How a rank ended: its code, when, and the error."""

    rank: int
    """Number of the rank; -1: the report of a launcher about its machine."""
    code: int
    time_ns: int
    host: str
    line: str = ""
    """Message of a UserError, a DivergedError or a launcher; otherwise empty."""
    traceback: str = ""
    lost_peer: bool = False
    """The error looks like a lost connection: the outcome of another rank explains it."""
    nothing_to_save: bool = False
    """A signal came before training began: the rank exited at once, and the other ranks get no time."""

    @property
    def precedence(self) -> tuple[bool, bool, bool, int]:
        """Sort key; the smallest outcome is the cause. Order: failures with a message, bugs, exits after
        saving, consequences (lost peers); within each, by time.

        A rank that exited at once may be the reason why another rank fails: between these two, time decides.
        """
        left_after_saving = self.code in LEAVING and not self.nothing_to_save
        return self.lost_peer, left_after_saving, self.code == 1 or self.nothing_to_save, self.time_ns


def outcome_of(error: BaseException | None) -> Outcome:
    """The outcome of this rank, whose recipe raised `error`, or returned (None)."""
    line = text = ""
    lost_peer = False
    if error is None:
        code = 0
    elif isinstance(error, KeyboardInterrupt):
        code = 130
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        line = error.code if isinstance(error.code, str) else ""
    elif isinstance(getattr(error, "exit_code", None), int):  # UserError, DivergedError
        code, line = error.exit_code, str(error)  # type: ignore[attr-defined]
    else:
        code, text = 1, "".join(traceback.format_exception(error))
        kinds = {kind.__name__ for kind in type(error).__mro__}
        lost_peer = bool(kinds & {"ConnectionError", "DistError"} or _LOST_PEER.search(str(error)))
    return Outcome(
        int(os.environ.get("RANK", "0")), code, time.time_ns(), socket.gethostname(), line, text, lost_peer
    )


def leave_line(line: str) -> None:
    """Leaves the line of the error that ends this command for the sweep that started it, if one did."""
    if path := os.environ.get(ERROR_LINE):
        with suppress(OSError):  # a full disk must not hide the error itself
            Path(path).write_text(line, encoding="utf-8")


_held = False


def hold(error: BaseException) -> bool:
    """Reports a failure of this rank, keeps its connections open and waits for the launcher to end it.

    Returns if there is nothing to wait for: no launcher of lptune, or no failure (`LEAVING`). The result is
    whether the launcher has the outcome.
    """
    global _held
    outcome = outcome_of(error)
    if outcome.code in LEAVING or not write_outcome(outcome):
        return False
    if _held:  # already done in the session
        return True
    _held = True
    if outcome.rank != 0 and LOGS in os.environ:  # its log; the launcher prints the cause
        print(outcome.traceback or outcome.line, file=sys.stderr, flush=True)
    time.sleep(_HOLD_S)
    return True


def announce() -> None:
    """Tells the launcher that this rank has started."""
    rank, num_local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _write(f"rank-{rank}", Rank(rank, os.getpid(), num_local))


def write_outcome(outcome: Outcome) -> bool:
    """Writes `outcome` to the launcher's folder, if it is the first of this rank; False without a folder."""
    folder = os.environ.get(OUTCOMES, "")
    return os.path.exists(f"{folder}/outcome-{outcome.rank}.json") or _write(
        f"outcome-{outcome.rank}", outcome
    )


def read_outcomes(folder: Path) -> list[Outcome]:
    """All outcomes written so far, sorted: the cause is the first."""
    outcomes = [Outcome(**json.loads(file.read_text("utf-8"))) for file in folder.glob("outcome-*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.precedence)


def read_ranks(folder: Path, known: set[int]) -> list[Rank]:
    """The ranks that have started and are not in `known`."""
    files = {int(file.stem.partition("-")[2]): file for file in folder.glob("rank-*.json")}
    return [Rank(**json.loads(files[rank].read_text("utf-8"))) for rank in sorted(set(files) - known)]


def _write(name: str, value: Rank | Outcome) -> bool:
    folder = os.environ.get(OUTCOMES)
    if folder is None or not os.path.isdir(folder):
        return False
    temporary = Path(folder, f".{name}")
    temporary.write_text(json.dumps(value._asdict()), encoding="utf-8")
    temporary.rename(Path(folder, f"{name}.json"))
    return True
