"""metrics.jsonl as columns: for each metric an array of steps and an array of values.

A run writes one object a line, and may be writing now. Not every row has every metric: `eval_loss` stands in
some rows only. A null is a number that was not finite (JSON has no NaN) or that is not known, such as the
utilization of a device without a published peak; it becomes a NaN here. Whatever else may stand in such a
file, after a crash, an edit or by intent, is left out and counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.base.errors import UserError
from lptune.base.files import LongLineError, lines_of, object_of

MAX_NAMES = 64
"""Different metrics that are read. A run writes about twenty, and one for each data source."""
_MAX_NAME = 80
MAX_STEP = 2**53
"""A row of this step or a later one is no run's: beyond it a float does not hold every integer."""
LARGEST = 1e100
"""A larger number counts as not finite, one below its inverse as 0. Runs compute in float32, which ends at
3.4e38, and between these bounds sums, squares and quotients of two numbers cannot overflow."""


class Column(NamedTuple):
    """One metric, by step. Steps increase, each is there once."""

    steps_N: npt.NDArray[np.int64]
    values_N: npt.NDArray[np.float64]  # below 1e100; NaN: null, or not finite

    @property
    def finite(self) -> "Column":
        """The steps whose value is a number."""
        is_finite_N = np.isfinite(self.values_N)
        return Column(self.steps_N[is_finite_N], self.values_N[is_finite_N])


@dataclass(frozen=True)
class Rows:
    """What metrics.jsonl holds, column by column."""

    columns: dict[str, Column]
    num_rows: int = 0
    first_time: str = ""
    last_time: str = ""
    """`time` of the first and the last row that has one, as written."""
    notes: tuple[str, ...] = ()
    """What was left out, a sentence each."""
    is_cut: bool = False
    """Whether the last line is incomplete."""

    def __getitem__(self, name: str) -> Column:
        """The column of a metric; an empty one if no row has it."""
        return self.columns.get(name, _EMPTY)

    @property
    def last_step(self) -> int:
        """The last step of any row; 0 if there is none."""
        return max((int(column.steps_N[-1]) for column in self.columns.values()), default=0)


_EMPTY = Column(np.zeros(0, np.int64), np.zeros(0))


def read_rows(path: Path) -> Rows:
    """Reads metrics.jsonl. Without such a file there are no rows.

    Raises UserError if it cannot be read, or has lines and none of them is a row of metrics.
    """
    reader = _Reader()
    try:
        for line in lines_of(path):
            reader.add(line)
    except LongLineError as error:
        reader.num_bad += 1
        reader.notes.append(f"line {reader.num_lines + 1:,} {error}; it and what follows was not read")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    rows = reader.rows()
    if not rows.num_rows and reader.num_bad:
        raise UserError(
            f"{path}: none of its {reader.num_bad:,} lines is a row of metrics; give the folder of a run"
        )
    return rows


class _Reader:
    """Collects rows. What a file says decides neither a type nor, beyond the limits, the memory."""

    def __init__(self) -> None:
        self.notes = list[str]()
        self.num_lines = self.num_rows = self.num_bad = 0
        self._columns = dict[str, tuple[list[int], list[float]]]()
        self._first_time = self._last_time = ""
        self._num_odd_values = 0
        self._is_cut = False
        self._unread = set[str]()

    def add(self, line: bytes) -> None:
        self.num_lines += 1
        row = object_of(line)
        step = row.pop("step", None) if row else None
        if row is not None and type(step) is int and 0 <= step < MAX_STEP:
            self._add_row(step, row)
        elif not line.endswith(b"\n"):
            self._is_cut = True
        elif line.strip():
            self.num_bad += 1

    def _add_row(self, step: int, row: dict[str, Any]) -> None:
        self.num_rows += 1
        time = row.pop("time", None)
        if isinstance(time, str):
            self._last_time = time[:40]
            self._first_time = self._first_time or self._last_time
        columns = self._columns
        for name, value in row.items():
            if type(value) is not float:  # most are
                value = _number(value)
                if value is None:
                    self._num_odd_values += 1
                    continue
            column = columns.get(name)
            if column is None:
                if len(columns) >= MAX_NAMES or len(name) > _MAX_NAME:
                    if len(self._unread) < MAX_NAMES:
                        self._unread.add(name[:_MAX_NAME])
                    continue
                column = columns[name] = ([], [])
            column[0].append(step)
            column[1].append(value)

    def rows(self) -> Rows:
        columns, is_unordered = {}, False
        for name, (steps, values) in self._columns.items():
            steps_N, values_N = np.array(steps, np.int64), np.array(values)
            values_N[~(np.abs(values_N) < LARGEST)] = np.nan
            values_N[np.abs(values_N) < 1 / LARGEST] = 0.0
            if (np.diff(steps_N) <= 0).any():
                is_unordered = True
                # Stable, so that of the rows of one step the last one in the file stays.
                order_N = np.argsort(steps_N, kind="stable")
                steps_N, values_N = steps_N[order_N], values_N[order_N]
                is_last_N = np.append(np.diff(steps_N) > 0, True)
                steps_N, values_N = steps_N[is_last_N], values_N[is_last_N]
            columns[name] = Column(steps_N, values_N)
        notes = list(self.notes)
        if num_bad := self.num_bad - len(self.notes):
            notes.append(f"lines that were left out, being no rows of metrics: {num_bad:,}")
        if self._num_odd_values:
            notes.append(f"values that were left out, being no numbers: {self._num_odd_values:,}")
        if self._unread:
            notes.append(f"metrics beyond {MAX_NAMES}, or with long names, were left out")
        if is_unordered:
            notes.append("steps repeat or go back; the last row of each step is shown")
        return Rows(columns, self.num_rows, self._first_time, self._last_time, tuple(notes), self._is_cut)


def _number(value: object) -> float | None:
    """A float for an integer, NaN for null; None for anything else."""
    if value is None:
        return float("nan")
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:  # JSON's integers have no largest one
            return None
    return None
