"""Errors of one row: stop, or skip and count.

Code that looks at one row raises `RowError` without a place, since it does not know the place. The code that
iterates over the rows passes the error and the place to `BadRows`, which does what `data.on_bad_row` says:
stop with an error of one line, or skip and count.

Rows are read before those in front of them are written (workers.py), and the first problem of the source is
the one to tell. So what goes wrong in reading becomes an item among the rows, whose turn comes.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from lptune.base.errors import UserError


class RowError(ValueError):
    """The problem of a row and its remedy, without the place."""


class Skipped(NamedTuple):
    """Consecutive bad rows: their number, and the line of the first."""

    number: int
    first: str


class BadRows:
    """Handles rows that cannot be used: `error` stops at the first, `skip` counts them."""

    among: list[Any] | None = None
    """The rows that are read, where skipped ones take their place as `Skipped`; None: they count at once."""

    def __init__(self, policy: str) -> None:
        assert policy in ("error", "skip")
        self.policy = policy
        self.count = 0
        self.first = ""

    def add(self, place: str, problem: RowError) -> None:
        """Raises UserError for the row at `place`, or counts it."""
        message = f"{place}: {problem}"
        if self.policy == "error":
            raise UserError(f"{message} (or set data.on_bad_row=skip)")
        line = " ".join(message.split())
        if self.among is None:
            self.skip(1, line)
        elif self.among and isinstance(last := self.among[-1], Skipped):
            self.among[-1] = Skipped(last.number + 1, last.first)
        else:
            self.among.append(Skipped(1, line))

    def skip(self, number: int, first: str) -> None:
        """Counts rows that are skipped. first: the line of the first of them."""
        self.count += number
        self.first = self.first or first


def listed(names: Iterable[Any]) -> str:
    """At most ten of the names, as `a, b, c`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:10]) + (", …" if len(texts) > 10 else "") or "none"
