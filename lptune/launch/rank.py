"""A process as one rank of several: whether it is one, what it does at its start, and how it ends.

A rank must not go on writing after its launcher was killed: the kernel then kills the rank, too
(PR_SET_PDEATHSIG). A rank writes its outcome for the launcher (outcome.py). Plain torchrun reads no outcome,
so there the rank prints its error itself.
"""

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from lptune.base.errors import UserError
from lptune.launch.hangs import give_signs
from lptune.launch.log import redirect_output
from lptune.launch.outcome import LAUNCHER, OUTCOMES, Outcome, announce, hold, outcome_of, write_outcome

_PEER_GRACE_S = 1.0
_OF_A_RANK = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def is_rank() -> bool:
    """Whether this process was started by torchrun (or by a cluster that sets the same variables).

    Raises UserError for variables with values that no launcher sets. In a process that is not a rank, the
    variables that only matter to a rank are removed from the environment.
    """
    required = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not required:
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
        return False
    given = required | {name: os.environ[name] for name in _OF_A_RANK if name in os.environ}
    odd = {name: value for name, value in given.items() if not re.fullmatch(r"\d{1,9}", value)}
    if odd or len(required) < 2:
        found = ", ".join(f"{name}={value}" for name, value in (odd or required).items())
        raise UserError(
            f"run: {found} in the environment: a launcher sets RANK, WORLD_SIZE and the like to numbers; "
            "unset what is left of one"
        )
    return True


def as_rank(body: Callable[[], object]) -> None:
    """Runs `body` as one rank of several, writes the outcome and exits with its code."""
    _die_with_launcher()
    if os.path.isdir(os.environ.get(OUTCOMES, "")):
        redirect_output()
        announce()
        give_signs()
    error: BaseException | None = None
    try:
        body()
    except BaseException as raised:
        error = raised
    outcome = outcome_of(error)
    if error is not None and not hold(error) and not write_outcome(outcome):
        _print_without_launcher(outcome)
    write_outcome(outcome)
    sys.exit(outcome.code)


def _print_without_launcher(outcome: Outcome) -> None:
    """Prints the error of this rank, since plain torchrun does not."""
    if outcome.traceback:
        print(f"rank {outcome.rank}:\n{outcome.traceback}", end="", file=sys.stderr, flush=True)
    elif outcome.line:
        who = "" if outcome.rank == 0 else f"rank {outcome.rank}: "
        print(f"error: {who}{outcome.line}", file=sys.stderr, flush=True)
        if outcome.rank != 0:
            # Most errors occur on every rank. The first exit ends the other ranks, so rank 0 gets time to
            # speak.
            time.sleep(_PEER_GRACE_S)


def _die_with_launcher() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The launcher may have died before that call.
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        with suppress(OSError):
            line = f"error: the launcher that started this rank is gone; unset {LAUNCHER} if none did\n"
            os.write(2, line.encode())
        os._exit(2)
