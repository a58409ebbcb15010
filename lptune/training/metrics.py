"""Metrics: one JSON object per step in metrics.jsonl, a progress bar or plain lines (step_lines.py), and
trackers on request (trackers.py).
"""

import json
import math
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from lptune.base.files import HeldFolder, named, open_regular
from lptune.base.progress import print_line
from lptune.config import LoggingConfig
from lptune.training.step_lines import Bar, TimeLeft, evaluation_line, step_line
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
        finite = {key: value for key, value in record.items() if _is_finite(value)}
        with named(self._path):
            self._file.write(json.dumps(dict.fromkeys(record) | finite, allow_nan=False) + "\n")
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


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
