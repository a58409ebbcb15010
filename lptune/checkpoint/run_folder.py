"""One run, one folder: config.yaml, metrics.jsonl, precision_plan.json, checkpoints/, export/, logs/.

A lock on OUTPUT_DIR/.lock keeps a second run out for as long as the first lives; the kernel drops it with the
process, so a killed run never leaves a stale one. A folder that holds something is locked before anything in
it is read: what is found there then stays true. A new folder is made only after everything the user can have
wrong was checked; it is looked at again once it is locked, since another run may have come first.

The folder may have been made by others. No link in it is followed, and nothing but regular files and folders
is used. What another tool or another run left is renamed, never overwritten.
"""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lptune import ranks
from lptune.checkpoint.files import read_json, remove_leftover, set_aside, write_json, write_text
from lptune.checkpoint.manifest import Manifest, list_checkpoints, step_of
from lptune.config import (
    RUN_FILES,
    RUN_FOLDERS,
    ExportConfig,
    FinetuneConfig,
    HeldFolder,
    UserError,
    check_inputs_stay,
    kind_of,
    open_regular,
    to_yaml,
)
from lptune.distributed import World

_PARTS = (*RUN_FILES, *RUN_FOLDERS)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class RunFolder:
    """Where a run writes. The main rank writes; the others only know the paths."""

    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self._world = world
        self._lock: IO[str] | None = None
        self._was_a_run = False  # before it was locked
        self._held: HeldFolder | None = None

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
        self._check_held()
        write_text(self.path / "config.yaml", to_yaml(cfg))

    def write_plan(self, plan: dict[str, Any]) -> None:
        """precision_plan.json."""
        write_json(self.path / "precision_plan.json", plan)

    def keep_metrics_until(self, step: int) -> None:
        """Drops the metrics of later steps, which the resumed run writes again (and a torn last line)."""
        kept = []
        text = ""
        if self.metrics.exists():
            with open(open_regular(self.metrics, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
                text = file.read()
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            at = record.get("step") if isinstance(record, dict) else None
            if isinstance(at, int) and at <= step:
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
        self._check_held()
        write_json(self.path / "export.json", {"step": step, **_form(cfg)})

    def create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        """Makes the folder, or prepares it for going on from `resumed`. All ranks call it."""
        if self._world.is_main:
            is_new = self._lock is None
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"output_dir: {self.path} cannot be made ({error.strerror}); choose another folder"
                ) from None
            self.lock()
            self._check_held()
            if is_new and any(kind_of(self.path / name) for name in _PARTS if name != ".lock"):
                raise UserError(
                    f"output_dir: another run has written to {self.path} since this one started; run again "
                    "to continue it, or choose another folder"
                )
            self.checkpoints.mkdir(exist_ok=True)
            # What a kill left half written or half removed; the lock says that nobody is at it.
            for partial in _leftovers(self.checkpoints):
                remove_leftover(partial)
            step = resumed.step if resumed else -1
            if resumed is None:
                self._set_aside_others(say)
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

    def _set_aside_others(self, say: Callable[[str], None]) -> None:
        """Renames what this new run would write over: files that no run of lptune has made, and an export."""
        names = ["export"] if self._was_a_run else ["export", "config.yaml", "metrics.jsonl"]
        for path in (self.path / name for name in names):
            if kind_of(path):
                say(f"set aside: {path} -> {set_aside(path).name}")

    def _check_held(self) -> None:
        if self._held is not None:
            self._held.check()

    def lock(self) -> None:
        """Keeps other runs out until `unlock`; the second call does nothing."""
        if self._lock is not None:
            return
        path = self.path / ".lock"
        self._was_a_run = bool(kind_of(path))
        held = HeldFolder(self.path)
        lock = open(open_regular(path, os.O_RDWR | os.O_CREAT), "r+")  # noqa: SIM115  (held until `unlock`)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            held.close()
            raise UserError(
                f"output_dir: another run is writing to {self.path}; wait for it or choose another folder"
            ) from None
        self._lock, self._held = lock, held

    def unlock(self) -> None:
        """Lets other runs in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._held is not None:
            self._held.close()
            self._held = None

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
        self._check_parts()

    def _check_parts(self) -> None:
        """That what is there of a run is of the right kind, and this user's to write."""
        for name in _PARTS:
            path, wanted = self.path / name, "a file" if name in RUN_FILES else "a folder"
            if (found := kind_of(path)) not in ("", wanted):
                other = "; output_dir itself may be a link" if found == "a link" else ""
                raise UserError(
                    f"output_dir: {path} is {found}, where a run has {wanted}; move it away or choose "
                    f"another folder{other}"
                )
        written = [self.path / ".lock", self.checkpoints, self.export]
        written += [*list_checkpoints(self.checkpoints), *_leftovers(self.checkpoints)]
        for path in written:
            if kind_of(path) in ("a file", "a folder") and not os.access(path, os.W_OK):
                raise UserError(
                    f"output_dir: {path} may not be written to, it belongs to {_owner(path)}; make it yours "
                    "(chown -R) or choose another folder"
                )


def _leftovers(checkpoints: Path) -> list[Path]:
    """What a killed run left in its folder of checkpoints, by the names that only a run gives."""
    return [path for name in ("step", "removed-step") for path in checkpoints.glob(f".tmp-{name}-[0-9]*")]


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"


def _form(cfg: ExportConfig) -> dict[str, Any]:
    return {"dtype": cfg.dtype, "max_shard_gib": float(cfg.max_shard_gib)}


@contextmanager
def open_run_folder(cfg: FinetuneConfig, world: World) -> Iterator[RunFolder]:
    """The folder of a run, checked, and locked if it exists; `create` makes it. All ranks call it.

    A disk that fills up, fails or vanishes within is a UserError: the run is stopped, what it had saved
    stays.
    """
    run = RunFolder(Path(cfg.output_dir).expanduser(), world)
    try:
        if world.is_main:
            check_inputs_stay(cfg)
            run.check(cfg.resume)
            if run.path.is_dir() and any(run.path.iterdir()):
                run.lock()
        yield run
    except OSError as error:
        file = Path(error.filename or run.path)
        is_inside = file.absolute().is_relative_to(run.path.absolute())
        if not is_inside or (error.errno not in _OF_THE_DISK and error.filename is None):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(
            f"output_dir: {run.path}: {where}{error.strerror}; make room there or mend it, and run again"
        ) from None
    finally:
        run.unlock()
