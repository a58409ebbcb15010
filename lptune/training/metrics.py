"""Metrics: one JSON object per step in metrics.jsonl, a progress bar or lines of at most 80 columns, and
trackers on request (trackers.py).
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lptune.base.files import HeldFolder, named, open_regular
from lptune.base.progress import print_line
from lptune.base.text import duration_text, terminal_columns
from lptune.config import LoggingConfig
from lptune.training.trackers import open_trackers


class MetricsWriter:
    """Writes the record of each step to all outputs. On other ranks than the main one it does nothing."""

    def __init__(
        self, path: Path, cfg: LoggingConfig, enabled: bool, first_step: int, num_steps: int
    ) -> None:
        """path: of metrics.jsonl. enabled: on the main rank. Steps are counted from `first_step`, the number
        of those that were done before, to `num_steps`.
        """
        self._path, self._file, self._folder = path, None, None
        if enabled:
            self._folder = HeldFolder(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = open(open_regular(path, flags), "a", encoding="utf-8")  # noqa: SIM115  (see __exit__)
        self._trackers = open_trackers(path.parent, cfg, first_step) if enabled else []
        self._first_step, self._num_steps = first_step, num_steps
        self._time_left = TimeLeft(num_steps)
        self._bar = Bar(first_step, num_steps) if enabled and sys.stderr.isatty() else None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        for tracker in self._trackers:
            tracker.close()
        if self._file is not None:
            with named(self._path):
                self._file.close()
        if self._folder is not None:
            self._folder.close()

    def write(self, record: dict[str, Any]) -> None:
        """Writes `record`: `step` and metrics by name. Floats read back bitwise; a float that is not finite
        becomes null, since JSON has no NaN. Raises UserError if the run's folder was replaced.
        """
        if self._file is None or self._folder is None:
            return
        self._folder.check()
        finite = {key: value for key, value in record.items() if without_nan(value) == value}
        with named(self._path):
            self._file.write(json.dumps(without_nan(record), allow_nan=False) + "\n")
            self._file.flush()
        for tracker in self._trackers:
            numbers = {k: v for k, v in finite.items() if isinstance(v, (int, float)) and k != "step"}
            tracker.log(numbers, record["step"])
        self._show(record, is_odd=len(finite) < len(record))

    def _show(self, record: dict[str, Any], is_odd: bool) -> None:
        """is_odd: whether a number is not finite; the step is then shown in any case."""
        step = record["step"]
        if "loss" in record:
            self._time_left.add(step)
        if self._bar is not None:
            self._bar.show(record)
        is_early = step - self._first_step <= 10
        is_due = self._bar is None and (is_early or step % 10 == 0 or step == self._num_steps)
        if is_odd or (is_due and "loss" in record):
            print_line(step_line(record, self._num_steps))
        if (line := evaluation_line(record, self._num_steps)) is not None:
            print_line(line + ("" if self._bar else self._time_left.text(step)))


def without_nan(value: Any) -> Any:
    """`value`, a number or a dictionary, with None for each float that JSON cannot write."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COLUMNS = 80
_SHORTEST_BAR = 6


def step_line(record: dict[str, Any], num_steps: int) -> str:
    """`step 20/600  loss 2.9979  lr 3.00e-03  grad_norm 1.733  25,069 tokens/s`. What finds no room is left
    out, the learning rate first.
    """
    formats = {"loss": ".4f", "accuracy": ".3f", "lr": ".2e", "grad_norm": ".3f"}
    parts = {
        name: f"{name} {record[name]:{form}}"
        for name, form in formats.items()
        if record.get(name) is not None
    }
    if record.get("tokens_per_s") is not None:
        parts["tokens_per_s"] = f"{record['tokens_per_s']:,.0f} tokens/s"
    if record.get("num_skipped"):
        parts["num_skipped"] = f"num_skipped {record['num_skipped']}"
    for name in ("lr", "grad_norm"):
        if len(_joined(record, num_steps, parts)) > _COLUMNS:
            parts.pop(name, None)
    return _joined(record, num_steps, parts)


def evaluation_line(record: dict[str, Any], num_steps: int) -> str | None:
    """`step 100/600  eval_loss 1.2345`, with the losses of each data source; None: no evaluation."""
    formats = {name: ".4f" for name in record if name == "eval_loss" or name.startswith("eval_loss/")}
    formats["eval_accuracy"] = ".3f"
    parts = {
        name: f"{name} {record[name]:{form}}"
        for name, form in formats.items()
        if record.get(name) is not None
    }
    return _joined(record, num_steps, parts) if parts else None


def _joined(record: dict[str, Any], num_steps: int, parts: dict[str, str]) -> str:
    return "  ".join([f"step {record['step']}/{num_steps}", *parts.values()])


class TimeLeft:
    """How long the remaining steps will take, by the mean of those since the first, which compiles."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first: tuple[int, float] | None = None
        self._step_s: float | None = None

    def add(self, step: int) -> None:
        """Notes that `step` has just ended."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = step, now_s
        elif step > self._first[0]:
            self._step_s = (now_s - self._first[1]) / (step - self._first[0])

    def text(self, step: int) -> str:
        """`  (about 3 min 20 s left)`; empty if it is not known or nothing is left."""
        if self._step_s is None or step >= self._num_steps:
            return ""
        return f"  (about {duration_text(self._step_s * (self._num_steps - step))} left)"


class Bar:
    """A progress bar in the last line of a terminal. What finds no room beside it is left out."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._eval_loss: float | None = None
        self._bar: tqdm[Any] = tqdm(
            total=num_steps,
            initial=first_step,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left",
            ncols=terminal_columns(),
            leave=False,
        )

    def close(self) -> None:
        """Removes the bar from the terminal."""
        self._bar.close()

    def show(self, record: dict[str, Any]) -> None:
        """Moves the bar to the step of `record`."""
        self._eval_loss = record.get("eval_loss", self._eval_loss)
        values = {**record, "eval_loss": self._eval_loss}
        formats = {
            "num_skipped": "{} skipped",
            "loss": "loss {:.4f}",
            "eval_loss": "eval {:.4f}",
            "tokens_per_s": "{:,.0f} tok/s",
            "peak_memory_gib": "{:.1f} GiB",
            "lr": "lr {:.1e}",
        }
        columns = terminal_columns()
        total = len(str(self._bar.total))
        room = columns - (2 * total + 1) - len(" || 00:00:00 left") - _SHORTEST_BAR
        shown = ""
        for name, form in formats.items():
            if values.get(name) is None or (name == "num_skipped" and not values[name]):
                continue
            text = f"  {form.format(values[name])}"
            if len(shown) + len(text) <= room:
                shown += text
        self._bar.ncols = columns
        self._bar.bar_format = "{n_fmt}/{total_fmt} |{bar}| {remaining} left" + shown
        self._bar.update(record["step"] - self._bar.n)
