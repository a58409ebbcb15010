"""The width of what a command prints."""

import shutil
import sys
import textwrap
from collections.abc import Iterator

_NARROWEST, WIDEST = 40, 110
"""Columns. Lines of more than 110 are hard to read, however wide the terminal is."""


def text_width() -> int:
    """Columns for text: those of the terminal, at most 110. Without a terminal: COLUMNS, else 80."""
    return min(WIDEST, max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns))


def line_width() -> int | None:
    """Columns for lines that a program may read: those of the terminal; None, for whole lines, in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else None


def wrapped(text: str, width: int, indent: int = 0, *, break_words: bool = False) -> list[str]:
    """`text` in lines of at most `width` columns, each indented. break_words: cut longer words (paths)."""
    margin = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=break_words,
        break_on_hyphens=False,
    )


def cut(line: str, width: int | None) -> str:
    """`line` in at most `width` columns; `…` stands for what was cut. width: None for any number."""
    return line if width is None or len(line) <= width else f"{line[: width - 1].rstrip()}…"


def columns(left: str, text: str, start: int, width: int) -> Iterator[str]:
    """Lines that begin with `left`, with `text` from column `start` on. A longer `left` has its own line."""
    lines = wrapped(text, width, start)
    if len(left) + 2 > start or not lines:
        yield left
        yield from lines
    else:
        yield left.ljust(start) + lines[0].lstrip()
        yield from lines[1:]
