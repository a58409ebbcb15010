"""Metrics: one JSON object per step in metrics.jsonl, a progress bar or plain lines, and trackers on
request.
"""

import importlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lptune.config import HeldFolder, LoggingConfig, UserError, how_to_install, named, open_regular
from lptune.progress import print_line, terminal_columns


def check_logging(cfg: LoggingConfig) -> None:
    """Raises UserError if a tracker is configured whose package is not installed. Call it before anything is
    written.
    """
    wanted = {
        "logging.tensorboard": ("tensorboard", cfg.tensorboard),
        "logging.wandb_project": ("wandb", cfg.wandb_project),
        "logging.trackio_project": ("trackio", cfg.trackio_project),
    }
    for key, (module, value) in wanted.items():
        if value and importlib.util.find_spec(module) is None:
            raise UserError(f"{key}: {module} is not installed; {how_to_install(module)}")


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
        self._trackers = _trackers(path.parent, cfg) if enabled else []
        self._num_steps = num_steps
        interactive = enabled and sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        if interactive:
            self._bar = tqdm(total=num_steps, initial=first_step, unit="step", ncols=terminal_columns())

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
        step = record["step"]
        for tracker in self._trackers:
            tracker.log(
                {k: v for k, v in finite.items() if isinstance(v, (int, float)) and k != "step"}, step
            )
        shown = _shown(record)
        if self._bar is not None:
            self._bar.set_postfix(
                {k: shown[k] for k in ("loss", "tokens_per_s", "num_skipped") if k in shown}, refresh=False
            )
            self._bar.update(step - self._bar.n)
        no_bar = self._bar is None and (step <= 10 or step % 10 == 0 or step == self._num_steps)
        if no_bar or "eval_loss" in record or len(finite) < len(record):
            print_line(f"step {step}/{self._num_steps}  " + "  ".join(f"{k} {v}" for k, v in shown.items()))


def _shown(record: dict[str, Any]) -> dict[str, str]:
    by_source = [key for key in record if key.startswith("eval_loss/")]
    losses = ["loss", "eval_loss", *by_source]
    formats = dict.fromkeys(losses, ".4f") | {"accuracy": ".3f", "eval_accuracy": ".3f"}
    formats |= {"lr": ".2e", "grad_norm": ".3f", "tokens_per_s": ",.0f"}
    shown = {key: format(record[key], spec) for key, spec in formats.items() if record.get(key) is not None}
    # Shown only if there are any.
    return shown | ({"num_skipped": str(record["num_skipped"])} if record.get("num_skipped") else {})


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Weights & Biases, or trackio, which has the same interface."""

    def __init__(self, module_name: str, project: str, name: str) -> None:
        self._module = importlib.import_module(module_name)
        self._module.init(project=project, name=name)

    def log(self, values: dict[str, float], step: int) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


def _trackers(folder: Path, cfg: LoggingConfig) -> list[Any]:
    trackers: list[Any] = []
    if cfg.tensorboard:
        trackers.append(_TensorBoard(folder))
    if cfg.wandb_project:
        trackers.append(_Tracker("wandb", cfg.wandb_project, folder.name))
    if cfg.trackio_project:
        trackers.append(_Tracker("trackio", cfg.trackio_project, folder.name))
    return trackers
