"""A line for each phase of a run that may take long: when it begins, and how long it took.

    with phase("loading weights"):      on a terminal one line, in place     without one
        ...                             loading weights ...                  loading weights ...
                                        loading weights: 3.1 s               loading weights: 3.1 s

A phase that knows how much there is to do gets a bar on a terminal:

    with phase("loading weights", total=num_elements) as advance:
        advance(4096)

This module imports the standard library alone, because the first phase of a run is the import of torch.
Whether there is a terminal is a question about stderr, where progress bars are drawn. Lines that stay go to
stdout. No colours are used.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lptune.base.text import duration_text, printable, terminal_columns

WORTH_A_LINE_S = 0.1
"""A phase that is shorter gets no line at its end."""
_BETWEEN_LINES_S = 60.0
VERBOSE = "LPTUNE_VERBOSE"
"""In the environment of a run and its ranks after `lptune run -v`."""
RECIPE = "LPTUNE_RECIPE"
"""In the environment of a run: the file of its recipe, for run.json."""
COMMAND = "LPTUNE_COMMAND"
"""In the environment of a run and its ranks: what followed `lptune run`, without torchrun's flags."""


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


Advance = Callable[[float], object]
"""Tells a phase how much more has been done, in the unit of its total."""


@contextmanager
def phase(
    what: str,
    *,
    total: float | None = None,
    in_background: bool = False,
    clock: Callable[[], float] | None = None,
) -> Iterator[Advance]:
    """Shows that `what` is being done in the block, and prints how long it took if that is 0.1 s or more.
    After an exception nothing is printed.

    total: how much there is to do, in any unit. in_background: the block runs in another thread than the
    loop, and only its end is told. clock: the time in seconds, if another than that of the wall.
    """
    clock = clock or time.perf_counter
    started_s = clock()
    if in_background:
        yield _nothing
    else:
        if not sys.stderr.isatty():
            print_line(f"{what} ...")
        with in_place(f"{what} ...") if total is None else _bar(what, total) as advance:
            yield advance
    duration_s = clock() - started_s
    if duration_s >= WORTH_A_LINE_S:
        print_line(f"{what}: {duration_text(duration_s)}")


def _nothing(_: float) -> None:
    """For phases that show no bar."""


@contextmanager
def in_place(text: str) -> Iterator[Advance]:
    """Shows `text` during the block in the last line of the terminal, cut to its width; without a terminal
    does nothing.
    """
    with _shown(_escaped(text), _nothing):
        yield _nothing


def _bar(what: str, total: float) -> AbstractContextManager[Advance]:
    """As `in_place`, with the share of `total` that is done and the time that is left."""
    shape = f"{_escaped(what)} {{percentage:3.0f}}% |{{bar}}| {{remaining}} left"
    return _shown(shape, _EachMinute(what, total), total=total)


def counting(what: str, unit: str) -> AbstractContextManager[Advance]:
    """Shows during the block how many of `unit` are done, where nobody knows how many there are: in place on
    a terminal, in a log at most once in a minute.
    """
    shape = f"{_escaped(what)}: {{n:,}} {_escaped(unit)}"
    # Each call is shown: they are a batch apart.
    return _shown(shape, _EachMinute(what, None, unit), mininterval=0, miniters=1)


@contextmanager
def _shown(shape: str, in_log: Advance, **options: Any) -> Iterator[Advance]:
    """A bar of tqdm with this format and these options. in_log: what to tell without a terminal."""
    if not sys.stderr.isatty():
        yield in_log
        return
    from tqdm import tqdm

    with tqdm(bar_format=shape, leave=False, ncols=terminal_columns(), **options) as bar:
        yield bar.update


class _EachMinute:
    """Prints how much is done, at most once in a minute: for a log."""

    def __init__(self, what: str, total: float | None, unit: str = "") -> None:
        """total: the share of it is printed; None: the number of `unit`."""
        self._what, self._total, self._unit, self._done = what, total, unit, 0.0
        self._told_s = time.perf_counter()

    def __call__(self, count: float) -> None:
        self._done += count
        if time.perf_counter() - self._told_s >= _BETWEEN_LINES_S:
            self._told_s = time.perf_counter()
            done = (
                f"{self._done:,.0f} {self._unit}"
                if self._total is None
                else f"{self._done / self._total:.0%}"
            )
            print_line(f"{self._what}: {done} ...")


def _escaped(text: str) -> str:
    """`text` for a format of tqdm: braces are doubled."""
    return printable(text).replace("{", "{{").replace("}", "}}")


def is_verbose() -> bool:
    """Whether the run was started with -v."""
    return VERBOSE in os.environ
