"""One run, one folder: config.yaml, metrics.jsonl, precision_plan.json, checkpoints/, export/, logs/.

A lock on OUTPUT_DIR/.lock keeps a second run out for as long as the first lives; the kernel drops it with the
process, so a killed run never leaves a stale one. A folder that exists is locked before anything in it is
read: what is found there then stays true. A new folder is made only after everything the user can have wrong
was checked.
"""

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lptune import ranks
from lptune.checkpoint.files import read_json, set_aside, write_json, write_text
from lptune.checkpoint.manifest import Manifest, list_checkpoints, step_of
from lptune.config import ExportConfig, UserError, to_yaml
from lptune.distributed import World

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class RunFolder:
    """Where a run writes. The main rank writes; the others only know the paths."""

    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self._world = world
        self._lock: IO[str] | None = None

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
        text = self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.exists() else ""
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("step", math.inf) <= step:
                kept.append(line + "\n")
        write_text(self.metrics, "".join(kept))

    def has_evaluation(self, step: int) -> bool:
        """Whether the metrics hold a held-out loss of `step`. All ranks call it."""
        lines: list[str] = []
        if self._world.is_main and self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return self._world.sum(any(r["step"] == step and "eval_loss" in r for r in records)) > 0

    def is_exported(self, step: int, cfg: ExportConfig) -> bool:
        """Whether export/ holds the weights of `step`. Raises UserError where it holds them otherwise than
        `cfg` asks.
        """
        path = self.path / "export.json"
        held = read_json(path) if path.is_file() and self.export.is_dir() else {}
        if not isinstance(held, dict) or held.get("step") != step:
            return False
        for key, value in _form(cfg).items():
            if held.get(key, value) != value:
                raise UserError(
                    f"{self.export}: is there already, with export.{key} {held[key]!r} (now {value!r}); "
                    "delete that folder to have it written anew, or use `lptune export`"
                )
        return True

    def write_exported(self, step: int, cfg: ExportConfig) -> None:
        """Says that export/ holds the weights of `step`, as `cfg` asks."""
        write_json(self.path / "export.json", {"step": step, **_form(cfg)})

    def create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        """Makes the folder, or prepares it for going on from `resumed`. All ranks call it."""
        if self._world.is_main:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"output_dir: {self.path} cannot be made ({error.strerror}); choose another folder"
                ) from None
            self.lock()
            # What a kill left half written or half removed; the lock says that nobody is at it.
            for partial in self.checkpoints.glob(".tmp-*"):
                shutil.rmtree(partial, ignore_errors=True)
            step = resumed.step if resumed else -1
            # Checkpoints of later steps are damaged, or of a past that the user has gone back from. They
            # would be mistaken for this run's own.
            for later in list_checkpoints(self.checkpoints):
                if step_of(later) > step:
                    say(f"set aside: {later} -> {set_aside(later).name}")
            # Without a checkpoint there is nothing to continue: what an interrupted start left is
            # overwritten.
            self.keep_metrics_until(step)
        self._world.barrier()
        ranks.keep_log(self.path / "logs")

    def lock(self) -> None:
        """Keeps other runs out until `unlock`; the second call does nothing."""
        if self._lock is not None:
            return
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"output_dir: another run is writing to {self.path}; wait for it or choose another folder"
            ) from None
        self._lock = lock

    def unlock(self) -> None:
        """Lets other runs in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check(self, resume: str) -> None:
        """Raises UserError when a run cannot write here; writes nothing."""
        if resume == "none" and (self.metrics.exists() or self.checkpoints.exists()):
            raise UserError(
                f"output_dir: {self.path} holds another run; choose a new folder, or continue it with "
                "resume=auto"
            )
        nearest = next(part for part in (self.path, *self.path.absolute().parents) if part.exists())
        if not nearest.is_dir():
            raise UserError(f"output_dir: {nearest} is a file; choose another folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"output_dir: {nearest} may not be written to; choose another folder")


def _form(cfg: ExportConfig) -> dict[str, Any]:
    return {"dtype": cfg.dtype, "max_shard_gib": float(cfg.max_shard_gib)}


@contextmanager
def open_run_folder(output_dir: str, resume: str, world: World) -> Iterator[RunFolder]:
    """The folder of a run, checked, and locked if it exists; `create` makes it. All ranks call it.

    A disk that fills up or fails within is a UserError: the run is stopped, what it had saved stays.
    """
    run = RunFolder(Path(output_dir).expanduser(), world)
    try:
        if world.is_main:
            run.check(resume)
            if run.path.is_dir() and any(run.path.iterdir()):
                run.lock()
        yield run
    except OSError as error:
        file = Path(error.filename or run.path)
        if error.errno not in _OF_THE_DISK or not file.absolute().is_relative_to(run.path.absolute()):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(
            f"output_dir: {run.path}: {where}{error.strerror}; make room there or mend it, and run again"
        ) from None
    finally:
        run.unlock()
