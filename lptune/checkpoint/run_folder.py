"""One run, one folder: config.yaml, metrics.jsonl, precision_plan.json, checkpoints/, export/.

A lock on OUTPUT_DIR/.lock keeps a second run out for as long as the first lives; the kernel drops it with the
process, so a killed run never leaves a stale one. The folder is made only after everything the user can have
wrong was checked.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lptune.checkpoint.files import write_json, write_text
from lptune.checkpoint.manifest import Manifest
from lptune.config import UserError, to_yaml
from lptune.distributed import World


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of training states."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder of the exported Hugging Face checkpoint."""
        return self.path / "export"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    def write_config(self, cfg: Any) -> None:
        """config.yaml: every key, so that it runs as it is whatever defaults become."""
        write_text(self.path / "config.yaml", to_yaml(cfg))

    def write_plan(self, plan: dict[str, Any]) -> None:
        """precision_plan.json."""
        write_json(self.path / "precision_plan.json", plan)

    def keep_metrics_until(self, step: int) -> None:
        """Drops the metrics of later steps, which the resumed run writes again (and a torn last line)."""
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= step:
                kept.append(line + "\n")
        write_text(self.metrics, "".join(kept))


def check_output_dir(path: Path, resume: str, world: World) -> None:
    """Raises UserError when a run cannot write to `path`; writes nothing. The main rank looks."""
    if not world.is_main:
        return
    run = RunFolder(path)
    if resume == "none" and (run.metrics.exists() or run.checkpoints.exists()):
        raise UserError(
            f"output_dir: {path} holds another run; choose a new folder, or continue it with resume=auto"
        )
    nearest = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not nearest.is_dir():
        raise UserError(f"output_dir: {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: {nearest} may not be written to; choose another folder")


@contextmanager
def open_run_folder(
    path: Path, resume: str, checkpoint: Manifest | None, world: World
) -> Iterator[RunFolder]:
    """Makes (or re-enters) the run's folder and holds its lock. All ranks call it; the main rank writes."""
    run = RunFolder(path)
    if not world.is_main:
        world.barrier()
        yield run
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: {path} cannot be made ({error.strerror}); choose another folder") from None
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output_dir: another run is writing to {path}; wait for it or choose another folder"
            ) from None
        run.checkpoints.mkdir(exist_ok=True)
        # Without a checkpoint there is nothing to continue: what an interrupted start left is overwritten.
        run.keep_metrics_until(checkpoint.step if checkpoint else -1)
        world.barrier()
        yield run
