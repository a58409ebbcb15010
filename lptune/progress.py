"""A line for each phase of a run that may take long: when it begins, and how long it took.

    with phase("loading weights"):      on a terminal one line, in place     without one
        ...                             loading weights ...                  loading weights ...
                                        loading weights: 3.1 s               loading weights: 3.1 s

This module imports the standard library alone, because the first phase of a run is the import of torch.
Whether there is a terminal is a question about stderr, where progress bars are drawn. Lines that stay go to
stdout. No colours are used.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lptune.config import printable

WORTH_A_LINE_S = 0.1
"""A phase that is shorter gets no line at its end."""


def print_line(text: str) -> None:
    """Prints `text` with escapes for control characters, above what is shown in place."""
    # Only a terminal shows something in place. Where there is none, tqdm stays out: it takes 50 ms to import,
    # and makes a lock of multiprocessing.
    if not sys.stderr.isatty():
        print(printable(text), flush=True)
        return
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(printable(text), flush=True)


@contextmanager
def phase(what: str, *, in_background: bool = False) -> Iterator[None]:
    """Shows that `what` is being done in the block, and prints how long it took if that is 0.1 s or more.
    After an exception nothing is printed.

    in_background: the block runs in another thread than the loop, and only its end is told.
    """
    started_s = time.perf_counter()
    if not in_background and not sys.stderr.isatty():
        print_line(f"{what} ...")
    with nullcontext() if in_background else in_place(f"{what} ..."):
        yield
    duration_s = time.perf_counter() - started_s
    if duration_s >= WORTH_A_LINE_S:
        print_line(f"{what}: {duration_text(duration_s)}")


@contextmanager
def in_place(text: str) -> Iterator[None]:
    """Shows `text` during the block in the last line of the terminal, cut to its width; without a terminal
    does nothing.
    """
    if not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm

    # The text is no format: braces in it are doubled.
    shown = printable(text).replace("{", "{{").replace("}", "}}")
    with tqdm(bar_format=shown, leave=False, ncols=terminal_columns()):
        yield


def terminal_columns() -> int:
    """The width for lines that are drawn in place: that of the terminal, at most 120."""
    # A terminal that does not report its width reports 0, and tqdm then draws nothing; shutil returns 80.
    return min(shutil.get_terminal_size().columns, 120)


def duration_text(duration_s: float) -> str:
    """A duration as text: `0.4 s`, `57.2 s`, `3 min 20 s`, `1 h 5 min`."""
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
