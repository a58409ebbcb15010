"""What is wrong with one row, and what happens then.

A problem inside a row is raised as `RowError`, without a place: the code that finds it sees one row only.
Whoever walks over the rows hands it to `BadRows`, which knows the place and the user's choice: stop with one
line, or skip and count.
"""

from lptune.config import UserError


class RowError(ValueError):
    """What is wrong with a row: problem and remedy, without the place."""


class BadRows:
    """Rows that cannot be used: `error` stops at the first, `skip` counts them."""

    def __init__(self, policy: str) -> None:
        assert policy in ("error", "skip")
        self.policy = policy
        self.count = 0
        self.first = ""

    def add(self, place: str, problem: RowError) -> None:
        """Raise UserError for the row at `place`, or count it."""
        message = f"{place}: {problem}"
        if self.policy == "error":
            raise UserError(f"{message} (or set data.on_bad_row=skip)")
        self.count += 1
        self.first = self.first or " ".join(message.split())
