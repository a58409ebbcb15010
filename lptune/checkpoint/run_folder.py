"""The run folder: config.yaml, metrics.jsonl, precision_plan.json, checkpoints/, export/, logs/, and what a
run tells about itself beside its metrics.

    run.json         id: names the run in trackers, 8 hex digits; recipe: name and digest of its file;
                     data_digest: of the training rows; launches: time, first step, ranks, device and
                     versions of each start; done: the last step and a digest of the config, once nothing is
                     left to do with that config
    samples.jsonl    answers to held-out prompts: step, when, prompt, answer, reference

Nothing is trained from these two. One that cannot be read, because somebody changed it, is written anew.

A lock on OUTPUT_DIR/.lock keeps a second run out while the first one lives. The kernel releases the lock when
the process ends, so a killed run leaves no stale lock. When the lock is taken depends on the folder:

- A folder that contains a run is locked after names, file types and permissions in it were checked, and
  before a checkpoint or export.json is read, so that their content cannot change afterwards.
- Any other folder is made and locked only after all checks of the user's input. Its .lock must be a new file;
  if it exists, another run came first.

Others may have made the folder, so no link in it is followed, and only regular files and folders are used. A
run continues in its folder only from a checkpoint in this folder. Any other start renames the results that
it finds there, of a run or of another tool, and never overwrites them.

With `checkpoint.copy_to`, output_dir may be a disk of each machine. Then machine 0 has all of the above but
checkpoints and export, which come together at the address; the others have logs, their parts of checkpoints
(parts.py) and a run.json with the id, by which a folder of another run is refused.
"""

import hashlib
import json
import os
import platform
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

import lptune
from lptune import launch
from lptune.base.errors import UserError, remedy
from lptune.base.files import (
    MAX_BYTES,
    TEMPORARY,
    HeldFolder,
    Lock,
    LongLineError,
    kind_of,
    lines_of,
    object_of,
    read_object,
    write_bytes,
    write_json,
    write_text,
)
from lptune.base.progress import RECIPE, print_line
from lptune.base.step_folders import list_checkpoints, step_of
from lptune.checkpoint import parts
from lptune.checkpoint.files import remove_leftover, set_aside
from lptune.checkpoint.hosts import PATIENCE_S, blind_machines, check_one_config, check_shared, rank_here
from lptune.checkpoint.manifest import Manifest
from lptune.checkpoint.retention import evaluations
from lptune.config import RUN_FILES, RUN_FOLDERS, ExportConfig, RunConfig, check_inputs_stay, to_yaml
from lptune.distributed import World, side_group
from lptune.launch.rendezvous import digest_of

_PARTS = (*RUN_FILES, *RUN_FOLDERS)
_PATIENCE_S = 10.0
"""With a copy, less than PATIENCE_S: each start of machines with a disk each takes it, and a shared folder
that shows files later is used as such disks, which is right, too."""
_RESULTS = (
    "export", "export.json", "config.yaml", "metrics.jsonl", "precision_plan.json", "run.json",
    "samples.jsonl", "shadow.jsonl", "report.html",
)  # fmt: skip


class RunFolder:
    """The folder to which a run writes. Only the main rank writes; other ranks use the paths."""

    def __init__(self, path: Path, world: World, *, has_copy: bool = False) -> None:
        """has_copy: the run has `checkpoint.copy_to`, so machines may have a disk each."""
        self.path = path
        self.checkpoints, self.export = path / "checkpoints", path / "export"
        self.parts = path / "parts"
        self.own_disks = False
        """Whether machines have a disk each. Known when any of them has the folder."""
        self._has_copy, self._is_compared = has_copy, False
        self.metrics = path / "metrics.jsonl"
        """One JSON object for each step."""
        self.reference = path / "reference.safetensors"
        """The numbers of the model before training, which a preference loss needs (reference.py)."""
        self._world = world
        self._lock: Lock | None = None
        self._held: HeldFolder | None = None

    @property
    def steps(self) -> Path:
        """Where `step-N` folders are written: `checkpoints`, or `parts`."""
        return self.parts if self.own_disks else self.checkpoints

    @property
    def prepares(self) -> bool:
        """Whether this rank prepares the folder on its disk: rank 0, or the first of each machine."""
        return rank_here()[0] == 0 if self.own_disks else self._world.is_main

    def compare_disks(self) -> None:
        """Finds whether machines have a disk each, and says so. Some machine has the folder. Raises UserError
        if they have, and the run has no copy. A collective.
        """
        if self._is_compared:
            return
        if not self._has_copy:
            check_shared("output_dir", self.path, self._world, PATIENCE_S, ", or set checkpoint.copy_to")
        elif blind := blind_machines(self.path, self._world, _PATIENCE_S):
            self.own_disks = True
            self._world.print(
                f"note: output_dir: what rank 0 writes to {self.path} does not appear on {', '.join(blind)}, "
                "so checkpoints and the export are whole at checkpoint.copy_to alone"
            )
        self._is_compared = True

    def on_main(self, work: Callable[[], int | None], *, each_disk: bool = False) -> int:
        """Has the main rank do `work` in the folder. After it all ranks go on with what it returned, since
        others may see an older state of a network folder, or all raise its UserError. each_disk: the ranks
        that prepare the folder do it, each on its disk. A collective.
        """
        found = 0
        with side_group(self._world) as group:
            line_of = self.on_this_machine if each_disk else str
            with group.together((UserError,), line_of), _errors_of(self.path):
                if self.prepares if each_disk else self._world.is_main:
                    self.check_held()
                    found = int(work() or 0)
            return group.of_main(found)

    def on_this_machine(self, line: object) -> str:
        """A line about a disk, with the name of its machine."""
        return f"on {socket.gethostname()}: {line}"

    def write_config(self, cfg: Any) -> None:
        """Writes config.yaml with every key, so that it stays the same config if defaults change."""
        write_text(self.path / "config.yaml", to_yaml(cfg))

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Writes precision_plan.json: the plan of every layer."""
        write_json(self.path / "precision_plan.json", plan)

    def keep_metrics_until(self, step: int, say: Callable[[str], None]) -> None:
        """Removes the metrics of steps after `step`, which the resumed run writes again, and an incomplete
        last line. If the file has lines that no run writes, the original is renamed and `say` gets a line.
        """
        kept, num_odd, why_odd = list[bytes](), 0, ""
        try:
            for line in lines_of(self.metrics):
                at = (object_of(line) or {}).get("step")
                if type(at) is not int:  # no run wrote it
                    num_odd += line.endswith(b"\n")
                elif at <= step:
                    kept.append(line.rstrip(b"\r\n") + b"\n")
        except LongLineError as error:
            why_odd = f"a line of it {error}"
        why_odd = why_odd or (f"{num_odd} of its lines are no metrics of a run" if num_odd else "")
        if why_odd:
            aside = set_aside(self.metrics).name
            say(f"set aside: {self.metrics} -> {aside}: {why_odd}")
        write_bytes(self.metrics, b"".join(kept))

    def has_evaluation(self, step: int) -> bool:
        """Whether the metrics have an eval_loss for `step`, as the main rank reads them. A collective."""
        return bool(self.on_main(lambda: step in evaluations(self.metrics)))

    def is_exported(self, step: int, cfg: ExportConfig) -> bool:
        """Whether export/ has the weights of `step`, as the main rank reads it. Raises UserError if it has
        them with other settings than `cfg`, or if export.json cannot be read. A collective.
        """
        return bool(self.on_main(lambda: self.export.is_dir() and self.says_exported(step, cfg)))

    def says_exported(self, step: int, cfg: ExportConfig) -> bool:
        """What export.json says of `is_exported`. On the main rank."""
        path = self.path / "export.json"
        if not path.is_file():
            return False
        held = _read_exported(path, self.export)
        if held["step"] != step:
            return False
        for key, value in _form(cfg).items():
            if held.get(key, value) != value:
                raise UserError(
                    f"{self.export}: exists already, with export.{key} {held[key]!r} (now {value!r}); "
                    "delete that folder to export again, or use `lptune export`"
                )
        return True

    def write_exported(self, step: int, cfg: ExportConfig) -> None:
        """Writes export.json, which says that export/ has the weights of `step`, with the settings `cfg`."""
        if self.own_disks:
            self.set_old_export_aside()
        write_json(self.path / "export.json", {"step": step, **_form(cfg)})

    def set_old_export_aside(self, said: bytes = b"") -> None:
        """Renames export/, from the time of a shared disk, before export.json says what is at the address:
        `said`. On the main rank.
        """
        about = self.path / "export.json"
        if kind_of(self.export) and not (kind_of(about) == "a file" and about.read_bytes() == said):
            self._world.print(f"set aside: {self.export} -> {set_aside(self.export).name}")

    def create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        """Makes and locks the folder, or prepares an existing folder. A collective.

        resumed: the checkpoint that the run continues. If it is in this folder, checkpoints and metrics of
        later steps are set aside or removed; else all results are renamed. say: gets a line for each rename.
        Raises UserError if the folder cannot be made or another run has locked it.
        """
        self.on_main(lambda: self._create(resumed, say))
        self.compare_disks()
        if self.own_disks:

            def prepare() -> None:
                self._make()
                self._clear_disk()
                parts.empty(self.parts, [resumed.folder] if resumed is not None else [])

            self.on_main(prepare, each_disk=True)
        launch.keep_log(self.path / "logs")

    def make(self, say: Callable[[str], None]) -> None:
        """Makes and locks the folder before `create`, for a checkpoint that is fetched into it. Without other
        checkpoints there, results are renamed. Arguments and errors: as of `create`. A collective.
        """

        def take() -> None:
            self._take()
            if not self.has_steps():
                self._set_aside_results(say)

        self.on_main(take)
        self.compare_disks()
        if self.own_disks:
            self.on_main(self._clear_disk, each_disk=True)

    def _clear_disk(self) -> None:
        """Renames what another run has left on the disk of another machine than rank 0's."""
        if not self._world.is_main and not self.has_steps():
            with suppress(FileNotFoundError):  # another machine on this disk has done it
                self._set_aside_results(lambda line: print_line(self.on_this_machine(line)))

    def has_steps(self) -> bool:
        """Whether there is a checkpoint, or a part of one that was whole at the address."""
        return any(map(list_checkpoints, (self.checkpoints, self.parts)))

    def _take(self) -> None:
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

    def _create(self, resumed: Manifest | None, say: Callable[[str], None]) -> None:
        self._take()
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
        if not self.own_disks:  # any more: this run has them whole
            parts.empty(self.parts)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            line = f"{self.path} cannot be made ({error.strerror}); {remedy(error, 'choose another folder')}"
            raise UserError(f"output_dir: {line}") from None

    def _is_own(self, resumed: Manifest) -> bool:
        """Whether the checkpoint is in this folder, also by a link in it or a link to it."""
        place = self.steps.resolve()
        return place in (resumed.folder.resolve().parent, resumed.folder.parent.resolve())

    def _set_aside_results(self, say: Callable[[str], None]) -> None:
        """Renames files and folders that this run would overwrite, if it does not continue from here. Empty
        files are not renamed: an interrupted start leaves them.
        """
        for path in (self.path / name for name in _RESULTS):
            if (found := kind_of(path)) and (found != "a file" or path.stat().st_size):
                say(f"set aside: {path} -> {set_aside(path).name}")

    def name_run(self) -> None:
        """Has each machine's folder say of which run it is, and no longer that it is done. run.json must be
        there. A collective.
        """
        run_id = self._world.gather(self.run_id() if self._world.is_main else None)[0]

        def write() -> None:
            if self.run_id() != run_id or "done" in self._about_run():
                write_json(self.path / "run.json", {"id": run_id})

        self.on_main(write, each_disk=True)

    def write_done(self, step: int, cfg: RunConfig) -> None:
        """Has run.json on each disk say that nothing is left to do with `cfg` after `step`. A collective."""

        def write() -> None:
            with suppress(OSError, UserError):  # the run is done, whether it can be said or not
                done = {"step": step, "config": digest_of(cfg)}
                write_json(self.path / "run.json", {**self._about_run(), "done": done})

        self.on_main(write, each_disk=True)

    def run_id(self) -> Any:
        """The id in run.json on this machine; None: there is none."""
        return self._about_run().get("id")

    def _about_run(self) -> dict[str, Any]:
        return read_object(self.path / "run.json", missing={})

    def check_held(self) -> None:
        """Raises UserError if the path no longer leads to the folder in which this run began."""
        if self._held is not None:
            self._held.check()

    def hold(self) -> None:
        """Opens the folder, so that `check_held` notices if it is removed or replaced."""
        if self._held is None:
            self._held = HeldFolder(self.path)

    def is_a_run(self) -> bool:
        """Whether the folder contains a run to continue, or another run may be using it."""
        names = (".lock", "checkpoints", "export.json")
        return any(kind_of(self.path / name) for name in names) or bool(list_checkpoints(self.parts))

    def lock(self, flags: int = 0) -> None:
        """Locks the folder until `unlock`. Raises UserError if another run has locked it.

        flags: with os.O_EXCL, raises FileExistsError if .lock exists, locked or not.
        """
        self.hold()
        path = self.path / ".lock"
        try:
            self._lock = Lock(path, os.O_RDWR | os.O_CREAT | flags)
        except BlockingIOError:
            self.unlock()
            raise UserError(
                f"output_dir: another run is writing to {self.path}; wait for it or choose another folder"
            ) from None
        if self._lock.why_not:
            self._world.print(
                f"note: {path} cannot be locked ({self._lock.why_not}); do not start a second run in that "
                "folder, since nothing would stop it"
            )

    def unlock(self) -> None:
        """Releases the lock, so that other runs can use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._held is not None:
            self._held.close()
            self._held = None

    def check(self, resume: str) -> None:
        """Raises UserError if a run cannot use this folder. resume: the key. Writes nothing."""
        found = [list_checkpoints(folder) for folder in (self.checkpoints, self.parts)]
        newest, of_part = (step_of(each[0]) if each else -1 for each in found)
        if resume == "none" and (self.metrics.exists() or self.checkpoints.exists() or of_part >= 0):
            raise UserError(
                f"output_dir: {self.path} holds another run; choose a new folder, or continue it with "
                "resume=auto"
            )
        if of_part > newest and not self._has_copy:
            raise UserError(
                f"output_dir: {self.path} has part of step {of_part} of a run that is whole at its "
                "checkpoint.copy_to alone; set that key again, or choose another folder"
            )
        nearest = next(part for part in (self.path, *self.path.absolute().parents) if part.exists())
        if not nearest.is_dir():
            raise UserError(f"output_dir: {nearest} is a file; choose another folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"output_dir: {nearest} may not be written to; choose another folder")
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises UserError if a file or folder of a run has the wrong type, or may not be written to."""
        parts = [(self.path / name, "a file" if name in RUN_FILES else "a folder") for name in _PARTS]
        for path, wanted in parts:
            if (found := kind_of(path)) not in ("", wanted):
                other = "; output_dir itself may be a link" if found == "a link" else ""
                raise UserError(
                    f"output_dir: {path} is {found}, where a run has {wanted}; move it away or choose "
                    f"another folder{other}"
                )
        # Other files are replaced by a rename, which needs no permission for the old file.
        written = [self.path / name for name in (".lock", *RUN_FOLDERS)]
        written += [*list_checkpoints(self.checkpoints), *_leftovers(self.checkpoints)]
        written += (self.path / "logs").glob("rank-*.log")
        for path in written:
            if kind_of(path) in ("a file", "a folder") and not os.access(path, os.W_OK):
                raise UserError(
                    f"output_dir: {path} may not be written to, it belongs to {_owner(path)}; make it yours "
                    "(chown -R) or choose another folder"
                )


def _leftovers(checkpoints: Path) -> list[Path]:
    """Files and folders that a killed run left among its checkpoints, by their temporary names."""
    return [
        path for name in ("step", "removed-step") for path in checkpoints.glob(f"{TEMPORARY}{name}-[0-9]*")
    ]


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return f"user {path.stat().st_uid}"


def _form(cfg: ExportConfig) -> dict[str, Any]:
    averages = {"average_checkpoints": cfg.average_checkpoints, "ema": cfg.ema}
    form = {"dtype": cfg.dtype, "max_shard_gib": float(cfg.max_shard_gib), "quantized": cfg.quantized}
    return form | averages


def _read_exported(path: Path, export: Path) -> dict[str, Any]:
    """`step` and the keys of `_form` from export.json. Keys are missing if an older version wrote it."""
    todo = f"remove that file to export again to {export}"
    held = read_object(path, todo=todo)
    if type(held.get("step")) is not int:
        raise UserError(f"{path}: does not say of which step {export.name}/ is; {todo}")
    # Older versions had none of these.
    return {"average_checkpoints": 1, "ema": True, "quantized": "none"} | held


@contextmanager
def open_run_folder(cfg: RunConfig, world: World) -> Iterator[RunFolder]:
    """Opens the run folder: checks it, and locks it if it contains a run. `create` makes a new folder. A
    collective.

    An OSError in the context that names a path in the folder becomes a UserError: the disk is full, has
    failed or was removed, and saved checkpoints stay. Other OSErrors are raised unchanged.
    """
    has_copy = cfg.checkpoint.copy_to is not None
    run = RunFolder(Path(cfg.output_dir).expanduser(), world, has_copy=has_copy)
    check_one_config(cfg, world)

    def check() -> None:
        check_inputs_stay(cfg)
        run.check(cfg.resume)
        if run.path.is_dir():
            run.hold()
        if run.is_a_run():
            run.lock()

    try:
        run.on_main(check)
        if any(world.gather(run.path.is_dir())):
            run.compare_disks()
            if run.own_disks:
                run.on_main(lambda: None if world.is_main else run.check(cfg.resume), each_disk=True)
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
        if not isinstance(name, (str, bytes, os.PathLike)):  # None, or the number of a file descriptor
            raise
        file = Path(os.fsdecode(name))
        if not file.absolute().is_relative_to(folder.absolute()):
            raise
        todo = remedy(error, "make room there or mend it")
        raise UserError(f"output_dir: {folder}: {file}: {error.strerror}; {todo}, and run again") from None


_MAX_LAUNCHES = 1000
_T = TypeVar("_T")


def write_launch(path: Path, data_digest: str, step: int, num_steps: int, world: World) -> None:
    """Adds this launch to run.json at `path`, or makes the file with a new id.

    step, num_steps: where the launch begins and where the run ends.
    """
    held: dict[str, Any] = {}
    with suppress(UserError):
        held = read_object(path)
    run_id, launches = held.get("id"), held.get("launches")
    # Trackers name a run by it, in an address or as a file, so no other text will do.
    is_id = isinstance(run_id, str) and re.fullmatch("[0-9a-f]{8}", run_id)
    launch = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "num_steps": num_steps,
        "num_ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "versions": {
            "lptune": lptune.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }
    write_json(
        path,
        {
            "id": run_id if is_id else secrets.token_hex(4),
            **_recipe(),
            "data_digest": data_digest,
            "launches": [*(launches if isinstance(launches, list) else []), launch][-_MAX_LAUNCHES:],
        },
    )


def keep_checks_until(path: Path, step: int) -> None:
    """Removes the shadow checks after `step` from shadow.jsonl at `path`, and lines that no run wrote. A run
    that goes on from `step` makes them again, or makes none.
    """
    lines = _lines(path)
    kept = [line for line in lines if (at := _value(line, "step", int)) is not None and at <= step]
    if len(kept) < len(lines):
        write_bytes(path, b"".join(kept))


def _recipe() -> dict[str, str]:
    """Name and digest of the recipe's file; empty if `lptune run` did not start it."""
    if not (file := os.environ.get(RECIPE)):
        return {}
    found = {"recipe": Path(file).stem}
    with suppress(OSError):  # the file may be gone by now
        found["recipe_sha256"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def write_samples(path: Path, samples: Sequence[Mapping[str, object]]) -> None:
    """Writes `samples` to samples.jsonl at `path`, in place of earlier ones with the same `when`."""
    replaced = {sample["when"] for sample in samples}
    kept = [line for line in _lines(path) if _value(line, "when", str) not in (None, *replaced)]
    write_bytes(path, b"".join([*kept, *(f"{json.dumps(sample)}\n".encode() for sample in samples)]))


def _lines(path: Path) -> list[bytes]:
    """The lines of the file; none if it cannot be read."""
    with suppress(OSError, ValueError):
        return [line.rstrip(b"\r\n") + b"\n" for line in lines_of(path, MAX_BYTES)]
    return []


def _value(line: bytes, key: str, kind: type[_T]) -> _T | None:
    """The value of `key` in the JSON object of `line`; None: no run wrote the line."""
    value = (object_of(line) or {}).get(key)
    return value if type(value) is kind else None
