"""The one exception that means: the user's input is wrong.

Everything a user can get wrong (a key, a path, a row, a tensor) ends as a `UserError`. The command line prints
its message as one line and exits with 2; a traceback always means a bug of ours.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message is one line: where, what was found, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def closest(word: str, choices: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the choice nearest to `word`, or an empty string when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[match[0]]!r}?)" if match else ""
