"""One run, one folder: config.yaml, metrics.jsonl, precision_plan.json, checkpoints/, export/, logs/.

A lock on OUTPUT_DIR/.lock keeps a second run out for as long as the first lives; the kernel drops it with the
process, so a killed run never leaves a stale one. A folder that holds a run is locked once the names, kinds
and rights in it were looked at, and before a checkpoint or export.json is read: what these say stays true.
Any other folder is made, locked and written to only after everything the user can have wrong was checked.
Its .lock must then be a new file: one that is there means that another run came first.

The folder may have been made by others. No link in it is followed, and nothing but regular files and folders
is used. A run continues its folder only from a checkpoint of that folder. What any other start finds there,
of another tool or another run, is renamed, never overwritten.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lptune import ranks
from lptune.checkpoint.files import read_json, remove_leftover, set_aside, write_json, write_text
from lptune.checkpoint.manifest import Manifest, list_checkpoints, step_of
from lptune.checkpoint.retention import MAX_LINE_BYTES, evaluations
from lptune.config import (
    RUN_FILES,
    RUN_FOLDERS,
    TEMPORARY,
    ExportConfig,
    HeldFolder,
    LongLineError,
    RunConfig,
    UserError,
    check_inputs_stay,
    is_mount_point,
    is_within,
    kind_of,
    lock_file,
    named,
    open_regular,
    raw_lines,
    remedy,
    to_yaml,
)
from lptune.distributed import World, side_group

_PARTS = (*RUN_FILES, *RUN_FOLDERS)
_RESULTS = ("export", "export.json", "config.yaml", "metrics.jsonl", "precision_plan.json")


class RunFolder:
    """Where a run writes. The main rank writes; the others only know the paths."""

    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self._world = world
        self._lock: int | None = None
        self._held: HeldFolder | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder of the exported Hugging Face checkpoint."""
        return self.path / "export"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block of work in the folder, most of it the main rank's. After it all ranks go on, or all raise
        the UserError of the first rank that failed. A collective.
        """
        with side_group(self._world) as group, group.together((UserError,), str), _errors_of(self.path):
            yield

    def write_config(self, cfg: Any) -> None:
        """config.yaml: every key, so that it runs as it is whatever defaults become."""
        self.check_held()
        write_text(self.path / "config.yaml", to_yaml(cfg))

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Writes precision_plan.json: the plan of every layer."""
        write_json(self.path / "precision_plan.json", plan)

    def keep_metrics_until(self, step: int, say: Callable[[str], None]) -> None:
        """Drops the metrics of later steps, which the resumed run writes again (and a torn last line).

        A file with other lines that no run writes is set aside, with a line; the new one has its metrics.
        """
        kept, num_odd, why_odd = list[str](), 0, ""
        if self.metrics.exists():
            descriptor = open_regular(self.metrics, os.O_RDONLY)
            with named(self.metrics), open(descriptor, "rb") as file:
                try:
                    for line in raw_lines(file, MAX_LINE_BYTES):
                        at = _step_of_line(line)
                        if at is None:
                            num_odd += line.endswith(b"\n")
                        elif at <= step:
                            kept.append(line.decode().rstrip("\r\n") + "\n")
                except LongLineError as error:
                    why_odd = f"a line of it {error}"
        why_odd = why_odd or (f"{num_odd} of its lines are no metrics of a run" if num_odd else "")
        if why_odd:
            aside = set_aside(self.metrics).name
            say(f"set aside: {self.metrics} -> {aside}: {why_odd}")
        write_text(self.metrics, "".join(kept))

    def has_evaluation(self, step: int) -> bool:
        """Whether the metrics hold a held-out loss of `step`, as the main rank reads them. A collective."""
        found = False
        with self.together():
            if self._world.is_main:
                found = step in evaluations(self.metrics)
        return self._world.sum(found) > 0

    def is_exported(self, step: int, cfg: ExportConfig) -> bool:
        """Whether export/ holds the weights of `step`, as the main rank reads it: the others' view of a
        network folder may be older. Raises UserError where it holds them otherwise than `cfg` asks, and where
        export.json does not tell. A collective.
        """
        found = False
        with self.together():
            if self._world.is_main:
                found = self._holds_export(step, cfg)
        return self._world.sum(found) > 0

    def _holds_export(self, step: int, cfg: ExportConfig) -> bool:
        path = self.path / "export.json"
        if not path.is_file() or not self.export.is_dir():
            return False
        held = _read_exported(path, self.export)
        if held["step"] != step:
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
        self.check_held()
        write_json(self.path / "export.json", {"step": step, **_form(cfg)})

    def create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        """Makes the folder, or prepares it for going on from `resumed`. All ranks call it."""
        with self.together():
            if self._world.is_main:
                self._create(resumed, say)
        ranks.keep_log(self.path / "logs")

    def _create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        self.check_held()
        if self._held is None:
            self._make()
        if self._lock is None:
            try:
                self.lock(os.O_EXCL)
            except FileExistsError:
                raise UserError(
                    f"output_dir: another run has written to {self.path} since this one started; run "
                    "again to continue it, or choose another folder"
                ) from None
        self.checkpoints.mkdir(exist_ok=True)
        # What a kill left half written or half removed; the lock says that nobody is at it.
        for partial in _leftovers(self.checkpoints):
            remove_leftover(partial)
        step = resumed.step if resumed and self._is_own(resumed) else -1
        if step < 0:
            self._set_aside_results(say)
        # Checkpoints of later steps are damaged, or of a past that the user has gone back from. They
        # would be mistaken for this run's own.
        for later in list_checkpoints(self.checkpoints):
            if step_of(later) > step:
                say(f"set aside: {later} -> {set_aside(later).name}")
        self.keep_metrics_until(step, say)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output_dir: {self.path} cannot be made ({error.strerror}); "
                f"{remedy(error, 'choose another folder')}"
            ) from None

    def _is_own(self, resumed: Manifest) -> bool:
        """Whether the checkpoint is one of this folder, be it by a link here or a link to here."""
        return any(is_within(path, self.checkpoints) for path in (resumed.folder.parent, resumed.folder))

    def _set_aside_results(self, say: Callable[[str], None]) -> None:
        """Renames what a run that continues nothing here would write over. Nothing is lost with an empty
        file, as an interrupted start leaves it.
        """
        for path in (self.path / name for name in _RESULTS):
            if (found := kind_of(path)) and (found != "a file" or path.stat().st_size):
                say(f"set aside: {path} -> {set_aside(path).name}")

    def check_held(self) -> None:
        """Raises UserError where the folder is no longer the one that this run began in."""
        if self._held is not None:
            self._held.check()

    def hold(self) -> None:
        """Opens the folder: from now on it is noticed when it goes away."""
        if self._held is None:
            self._held = HeldFolder(self.path)

    def is_a_run(self) -> bool:
        """Whether there is something that a run would continue, or another run that may be at it."""
        return any(kind_of(self.path / name) for name in (".lock", "checkpoints", "export.json"))

    def lock(self, flags: int = 0) -> None:
        """Keeps other runs out until `unlock`.

        flags: os.O_EXCL raises FileExistsError where there is a lock, held or not.
        """
        self.hold()
        path = self.path / ".lock"
        self._lock = open_regular(path, os.O_RDWR | os.O_CREAT | flags)
        try:
            with named(path):
                why_not = lock_file(self._lock, wait=False)
        except BlockingIOError:
            self.unlock()
            raise UserError(
                f"output_dir: another run is writing to {self.path}; wait for it or choose another folder"
            ) from None
        if why_not:
            self._world.print(
                f"note: {path} cannot be locked ({why_not}); nothing keeps a second run out of that folder, "
                "so start none"
            )

    def unlock(self) -> None:
        """Lets other runs use the folder again."""
        if self._lock is not None:
            os.close(self._lock)
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
        parts = [(self.path / name, "a file" if name in RUN_FILES else "a folder") for name in _PARTS]
        # A name that a checkpoint will need: found at the first save, it would cost what was trained.
        steps = self.checkpoints.glob("step-" + 8 * "[0-9]")
        parts += [(path, "a folder") for path in steps if not path.is_dir()]
        # Anything else where a file is first written is replaced.
        scratch = [self.path / f"{TEMPORARY}{name}" for name in RUN_FILES]
        parts += [(path, "a file") for path in scratch if kind_of(path) == "a folder"]
        for path, wanted in parts:
            if (found := kind_of(path)) not in ("", wanted):
                other = "; output_dir itself may be a link" if found == "a link" else ""
                raise UserError(
                    f"output_dir: {path} is {found}, where a run has {wanted}; move it away or choose "
                    f"another folder{other}"
                )
        if is_mount_point(self.export):
            raise UserError(
                f"output_dir: {self.export} is a mount point, which a run cannot replace by its export; "
                "unmount it or choose another folder"
            )
        # Of the other files the old ones are replaced by a rename, whoever they belong to.
        written = [self.path / name for name in (".lock", *RUN_FOLDERS)]
        written += [*list_checkpoints(self.checkpoints), *_leftovers(self.checkpoints)]
        written += (self.path / "logs").glob("rank-*.log")
        for path in written:
            if kind_of(path) in ("a file", "a folder") and not os.access(path, os.W_OK):
                raise UserError(
                    f"output_dir: {path} may not be written to, it belongs to {_owner(path)}; make it yours "
                    "(chown -R) or choose another folder"
                )


def _step_of_line(line: bytes) -> int | None:
    """The step of a line of the metrics; None: no run wrote it."""
    try:
        record = json.loads(line.decode())  # what is no UTF-8 is no run's
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


def _leftovers(checkpoints: Path) -> list[Path]:
    """What a killed run left in its folder of checkpoints, by the names that only a run gives."""
    return [
        path for name in ("step", "removed-step") for path in checkpoints.glob(f"{TEMPORARY}{name}-[0-9]*")
    ]


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"


def _form(cfg: ExportConfig) -> dict[str, Any]:
    return {"dtype": cfg.dtype, "max_shard_gib": float(cfg.max_shard_gib)}


def _read_exported(path: Path, export: Path) -> dict[str, Any]:
    """`step` and `_form` of export.json; what an older version did not write may be missing."""
    try:
        held = read_json(path)
        form = {key: type(value) for key, value in _form(ExportConfig()).items()}
        if not isinstance(held, dict) or type(held.get("step")) is not int:
            raise UserError(f"{path}: does not say of which step {export.name}/ is, found {held!r:.60}")
        for key, type_ in form.items():
            if key in held and (type(held[key]) is not type_ or held[key] != held[key]):
                raise UserError(f"{path}: {key}: cannot be {held[key]!r:.60}")
    except UserError as error:
        raise UserError(f"{error}; remove that file to have {export} written anew") from None
    return held


@contextmanager
def open_run_folder(cfg: RunConfig, world: World) -> Iterator[RunFolder]:
    """The folder of a run, checked, and locked if it holds one; `create` makes it. All ranks call it.

    An OSError within that names a path of that folder (a disk that fills up, fails or vanishes) is a
    UserError: the run is stopped, what it had saved stays. Any other OSError goes on as it is.
    """
    run = RunFolder(Path(cfg.output_dir).expanduser(), world)
    try:
        with run.together():
            if world.is_main:
                check_inputs_stay(cfg)
                run.check(cfg.resume)
                if run.path.is_dir():
                    run.hold()
                if run.is_a_run():
                    run.lock()
        with _errors_of(run.path):
            yield run
    finally:
        run.unlock()


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """An OSError that names a path in `folder`, a run's, is a UserError."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if not isinstance(name, (str, bytes, os.PathLike)):  # none, or the number of a descriptor
            raise
        file = Path(os.fsdecode(name))
        if not file.absolute().is_relative_to(folder.absolute()):
            raise
        todo = remedy(error, "make room there or mend it")
        raise UserError(f"output_dir: {folder}: {file}: {error.strerror}; {todo}, and run again") from None
