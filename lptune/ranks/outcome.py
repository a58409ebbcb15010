"""Outcomes: every rank writes down how it ends, in a folder of its launcher, before anybody can notice.

An exit code alone does not say which rank was first, and a rank that fails takes its peers down with
connection errors of their own, often before its own process is gone. So a failing rank writes its outcome
while its connections are still open, and keeps them open (`hold`) until the launcher, which reads the folder
ten times a second, has told the other machines and ends all ranks. The cause therefore stands written before
its first consequence. Only a rank that is killed cannot do that; errors that look like a lost peer are
marked, so that its launcher's word counts for more than theirs.
"""

import json
import os
import re
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from lptune.ranks.log import LOGS

OUTCOMES = "LPTUNE_OUTCOMES"  # folder for outcomes, from the launcher to its ranks
LAUNCHER = "LPTUNE_LAUNCHER_PID"
LEAVING = (0, 130, 143)  # done, KeyboardInterrupt, stopped by a signal: none of them is a failure
_HOLD_S = 15.0  # the launcher needs about one second, see lptune/cli/watch.py
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|remote process exited|socket"
    r"|nccl communicator was aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)


class Rank(NamedTuple):
    """A rank that has started."""

    rank: int
    pid: int
    node: int
    num_nodes: int
    num_local: int
    """Ranks on this machine."""
    store: str
    """`host:port` of the launchers' common key-value store; empty where there is none."""
    run_id: str


class Outcome(NamedTuple):
    """How a rank ended."""

    rank: int
    """-1: a launcher's word about its machine."""
    code: int
    time_ns: int
    host: str
    line: str = ""
    """Message of a UserError, a DivergedError or a launcher; else empty."""
    traceback: str = ""
    lost_peer: bool = False
    """The error looks like the end of a connection: another rank's outcome explains it."""
    nothing_to_save: bool = False
    """A signal came before training began: the rank left at once, and its peers are not waited for."""

    @property
    def precedence(self) -> tuple[bool, bool, bool, int]:
        """The smallest is the cause: failures with a name, bugs, leaving, consequences; within each, time.

        A rank that left at once may be why another one fails: between these two time decides.
        """
        left_after_saving = self.code in LEAVING and not self.nothing_to_save
        return self.lost_peer, left_after_saving, self.code == 1 or self.nothing_to_save, self.time_ns


def outcome_of(error: BaseException | None) -> Outcome:
    """The outcome of this rank, whose recipe ended by `error`, or by itself."""
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


_held = False


def hold(error: BaseException) -> bool:
    """Reports a failure of this rank and waits for the launcher to end it, connections open.

    Returns where there is nothing to wait for: no launcher of ours, or no failure (`LEAVING`). True where the
    launcher has the outcome.
    """
    global _held
    outcome = outcome_of(error)
    if outcome.code in LEAVING or not write_outcome(outcome):
        return False
    if _held:  # in the session already
        return True
    _held = True
    if outcome.rank != 0 and LOGS in os.environ:  # into this rank's log; the launcher prints only the cause
        print(outcome.traceback or outcome.line, file=sys.stderr, flush=True)
    time.sleep(_HOLD_S)
    return True


def announce() -> None:
    """Tells the launcher that this rank has started."""
    variables = os.environ
    has_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _write(
        f"rank-{variables['RANK']}",
        Rank(
            int(variables["RANK"]),
            os.getpid(),
            int(variables.get("GROUP_RANK", "0")),
            int(variables.get("GROUP_WORLD_SIZE", "1")),
            int(variables.get("LOCAL_WORLD_SIZE", "1")),
            f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}" if has_store else "",
            variables.get("TORCHELASTIC_RUN_ID", ""),
        ),
    )


def write_outcome(outcome: Outcome) -> bool:
    """Writes it where the launcher looks, unless this rank has written one; False without such a place."""
    folder = os.environ.get(OUTCOMES, "")
    return os.path.exists(f"{folder}/outcome-{outcome.rank}.json") or _write(
        f"outcome-{outcome.rank}", outcome
    )


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes written so far, the cause first."""
    outcomes = [Outcome(**json.loads(file.read_text("utf-8"))) for file in folder.glob("outcome-*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.precedence)


def read_ranks(folder: Path, known: set[int]) -> list[Rank]:
    """The ranks that have started and are not `known`."""
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
