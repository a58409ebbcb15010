"""Errors of one row: stop, or skip and count.

Code that looks at one row raises `RowError` without a place, since it does not know the place. The code that
iterates over the rows passes the error and the place to `BadRows`, which does what `data.on_bad_row` says:
stop with an error of one line, or skip and count.
"""

from collections.abc import Iterable
from typing import Any

from lptune.base.errors import UserError


class RowError(ValueError):
    """The problem of a row and its remedy, without the place."""


class BadRows:
    """Handles rows that cannot be used: `error` stops at the first, `skip` counts them."""

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
        self.count += 1
        self.first = self.first or " ".join(message.split())


def listed(names: Iterable[Any]) -> str:
    """At most ten of the names, as `a, b, c`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:10]) + (", …" if len(texts) > 10 else "") or "none"
