"""metrics.jsonl as columns: for each metric an array of steps and an array of values.

A run writes one object a line, and may be writing now. Not every row has every metric: `eval_loss` stands in
some rows only. A null is a number that was not finite (JSON has no NaN) or that is not known, such as the
utilization of a device without a published peak; it becomes a NaN here. Whatever else may stand in such a
file, after a crash, an edit or by intent, is left out and counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.base.errors import UserError
from lptune.base.files import LongLineError, lines_of, object_of

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
    columns = dict[str, tuple[list[int], list[float]]]()
    first_time = last_time = ""
    notes = list[str]()
    num_lines = num_rows = num_bad = num_odd_values = 0
    is_cut = False
    try:
        for line in lines_of(path):
            num_lines += 1
            row = object_of(line)
            step = row.pop("step", None) if row else None
            if row is None or type(step) is not int or not 0 <= step < MAX_STEP:
                is_cut = not line.endswith(b"\n")
                num_bad += bool(line.strip()) and not is_cut
                continue
            num_rows += 1
            time = row.pop("time", None)
            if isinstance(time, str):
                first_time, last_time = first_time or time, time
            for name, value in row.items():
                if value is None:
                    value = float("nan")
                elif type(value) is not float and (type(value) is not int or abs(value) >= LARGEST):
                    num_odd_values += 1
                    continue
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    except LongLineError as error:
        notes.append(f"line {num_lines + 1:,} {error}; it and what follows was not read")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not num_rows and (num_bad or notes):
        count = num_bad + len(notes)
        raise UserError(f"{path}: none of its {count:,} lines is a row of metrics; give the folder of a run")
    found = {name: _column(*each) for name, each in columns.items()}
    if num_bad:
        notes.append(f"lines that were left out, being no rows of metrics: {num_bad:,}")
    if num_odd_values:
        notes.append(f"values that were left out, being no numbers: {num_odd_values:,}")
    if any(steps != sorted(set(steps)) for steps, _ in columns.values()):
        notes.append("steps repeat or go back; the last row of each step is shown")
    return Rows(found, num_rows, first_time, last_time, tuple(notes), is_cut)


def _column(steps: list[int], values: list[float]) -> Column:
    steps_N, first_N = np.unique(np.array(steps[::-1], np.int64), return_index=True)
    values_N = np.array(values[::-1], np.float64)[first_N]  # the last one in the file of each step
    values_N[~(np.abs(values_N) < LARGEST)] = np.nan
    values_N[np.abs(values_N) < 1 / LARGEST] = 0.0
    return Column(steps_N, values_N)
