"""What a run prints before it works: banner and phases (lptune/cli/banner.py, lptune/base/progress.py)."""

import re

_LINE = re.compile(r"(recipe|model|data|precision|output|memory:) +\S.*|[a-z ]+ \.\.\.|[a-z ]+: [\d.]+ s")


def only_told(stdout: str) -> bool:
    """Whether all lines are of the banner or of phases; true of an empty text."""
    return all(map(_LINE.fullmatch, stdout.splitlines()))
