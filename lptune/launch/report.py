"""How the launcher prints the cause of an end: once, as the rank that failed first says it."""

import re
import signal
import sys

from lptune.base.text import printable
from lptune.launch.outcome import LEAVING, Outcome

_NUMBERED = re.compile(r"rank \d+: ")


def describe_silent(rank: int, exit_code: int) -> tuple[int, str]:
    """Exit code and words for a rank that could not write an outcome."""
    if exit_code < 0:
        return 128 - exit_code, f"rank {rank} was killed by {signal.Signals(-exit_code).name}"
    return exit_code or 1, f"rank {rank} ended with exit code {exit_code} and reported no error"


def print_own(cause: Outcome) -> None:
    """Prints an outcome of this machine: the traceback, or the line of the error."""
    if cause.traceback:
        print(f"rank {cause.rank}:\n{cause.traceback}", end="", file=sys.stderr)
        if cause.lost_peer:
            print(
                f"rank {cause.rank} lost a rank that reported no error: was a machine or a launcher killed?",
                file=sys.stderr,
            )
    elif cause.code not in LEAVING:
        # What fails on one rank may be raised on all of them, with the number of that rank.
        who = f"rank {cause.rank}: " if cause.rank > 0 and not _NUMBERED.match(cause.line) else ""
        line = cause.line or f"ended with exit code {cause.code}"
        print(printable(f"error: {who}{line}"), file=sys.stderr)


def print_other(cause: Outcome) -> None:
    """Prints an outcome of another machine in one line, with the name of that machine."""
    where = f"on {cause.host}: " if cause.host else ""
    who = f"rank {cause.rank} " if cause.rank >= 0 and not _NUMBERED.match(cause.line) else ""
    what = cause.line
    if cause.traceback:
        what = f"{cause.traceback.strip().splitlines()[-1]} (the traceback stands in the output there)"
    print(printable(f"error: {who}{where}{what or f'exit code {cause.code}'}"), file=sys.stderr)
