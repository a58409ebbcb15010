"""Trackers: TensorBoard, Weights & Biases and trackio get the numbers of each step, and what the run is.

A run has an id in run.json, which it keeps when it is resumed. W&B continues the run of this id, trackio the
run of its name. A resumed run repeats the steps after its checkpoint: TensorBoard drops the first form of
them, W&B the second; both are equal.
"""

import importlib
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lptune.base.errors import UserError, how_to_install
from lptune.base.files import read_object
from lptune.config import LoggingConfig


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


def open_trackers(folder: Path, cfg: LoggingConfig, first_step: int) -> list[Any]:
    """The trackers of `cfg`, each with `log(values, step)` and `close()`.

    folder: of the run, with its config.yaml and run.json. first_step: the number of steps done before.
    """
    trackers: list[Any] = []
    if cfg.tensorboard:
        trackers.append(_TensorBoard(folder, first_step))
    if cfg.wandb_project:
        keys = {"id": _run_id(folder), "name": folder.name, "dir": str(folder)}
        trackers.append(_Service("wandb", folder, project=cfg.wandb_project, **keys))
    if cfg.trackio_project:
        name = f"{folder.name}-{_run_id(folder)}"
        trackers.append(_Service("trackio", folder, project=cfg.trackio_project, name=name))
    return trackers


def _config(folder: Path) -> dict[str, Any]:
    """config.yaml of the run; empty if there is none."""
    found: Any = {}
    with suppress(FileNotFoundError):
        # Environment variables stay names: their values may be secrets.
        found = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    return found if isinstance(found, dict) else {}


def _run_id(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return str(read_object(folder / "run.json", missing={}).get("id", "0"))
    return "0"


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier launch wrote of the steps that come again is hidden.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if first_step == 0:
            text = "\n".join(f"    {line}" for line in OmegaConf.to_yaml(_config(folder)).splitlines())
            self._writer.add_text("config.yaml", text, 0)

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Service:
    """A module with `init`, `log` and `finish`: wandb, or trackio."""

    def __init__(self, module: str, folder: Path, **options: str) -> None:
        self._module = importlib.import_module(module)  # noqa: TID251  (a constant table)
        self._module.init(**options, resume="allow", config=_config(folder))

    def log(self, values: dict[str, float], step: int) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()
