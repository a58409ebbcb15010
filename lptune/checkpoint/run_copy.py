"""The copy of a run in object storage, at `checkpoint.copy_to`: for machines that lose their disks.

    ADDRESS/checkpoints/step-00000100/  the files of a checkpoint as in output_dir; manifest.json is the seal
    ADDRESS/metrics.jsonl, run.json, …  what a run that continues elsewhere reads beside it (_BESIDE)
    ADDRESS/export/                     the export; SHA256SUMS is the seal

Each rank copies the files that it has written itself, in the thread that wrote them. When all ranks have
done so, rank 0 copies the files beside the checkpoint and writes the seal (storage.py). If storage fails
meanwhile, a line says so and the run goes on: its checkpoint is on its disk, and the next one is copied
again. If it fails before the first step, when a wrong address can still be mended, the run ends.

A run finds its checkpoint on its disk, or at the address if that has a newer one. What comes from there is
believed no more than what a disk holds: every byte is compared with the manifest, and a damaged checkpoint is
passed over. Then it is a checkpoint of output_dir like any other, and so are the files beside it.

An address has one run, by the id in run.json. A run that does not continue that one is refused.
"""

import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY, kind_of, object_of, read_object, write_bytes
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.base.text import size_text
from lptune.checkpoint import manifest, sums
from lptune.checkpoint.files import free_bytes, publish_folder, remove_leftover, set_aside, why
from lptune.checkpoint.manifest import Manifest, read_manifest, verify
from lptune.checkpoint.resume import find_checkpoint
from lptune.checkpoint.retention import evaluations, steps_to_keep
from lptune.checkpoint.run_folder import RunFolder
from lptune.checkpoint.storage import Storage, StorageError
from lptune.config import CheckpointConfig
from lptune.distributed import SideGroup, World, side_group

_BESIDE = (
    "config.yaml", "precision_plan.json", "metrics.jsonl", "shadow.jsonl", "run.json", "samples.jsonl",
    "reference.safetensors",
)  # fmt: skip
_ERRORS = (OSError, UserError)
_KEY = "checkpoint.copy_to"
_SEAL = manifest.NAME
_OLD_SEAL = f"old-{_SEAL}"
"""The name of the seal of a checkpoint that was set aside."""


class RunCopy:
    """The copy of one run, on this rank. All methods are collectives."""

    def __init__(self, address: str, folder: RunFolder, cfg: CheckpointConfig, world: World) -> None:
        self._folder, self._cfg, self._world = folder, cfg, world
        with side_group(world) as group, self._at_start(group):
            self._storage = Storage(address)

    # ---- before training

    def find(self, resume: str) -> Manifest | None:
        """`resume.find_checkpoint`, with `auto` also at the address: if the newest intact checkpoint there is
        of a later step, it is fetched into output_dir. Damaged ones get a line each.

        Raises UserError as `find_checkpoint` does, unless the address has what output_dir has lost; if the
        address cannot be read or has another run; and if all checkpoints there are damaged and output_dir has
        none.
        """
        found, damaged = None, None
        try:
            found = find_checkpoint(self._folder.checkpoints, resume, self._world, self._world.print)
        except UserError as error:
            if resume != "auto":
                raise
            damaged = error
        with side_group(self._world) as group:
            steps = list[int]()
            with self._at_start(group):
                if self._world.is_main:
                    steps = self._steps()
                    self._check_same_run(found, resume, steps)
            least = found.step if found is not None else -1
            num_later = group.of_main(sum(step > least for step in steps)) if resume == "auto" else 0
            for number in range(num_later):
                step = group.of_main(steps[number] if self._world.is_main else 0)
                name = step_folder_name(step)
                with self._world.phase(f"fetching {name} from {self._storage.address}"):
                    fetched = self._fetch(name, group)
                if isinstance(fetched, Manifest):
                    return fetched
                self._world.print(f"warning: checkpoint passed over: {fetched}")
        if damaged is not None:
            raise damaged
        if num_later and found is None:
            raise UserError(
                f"{_KEY}: {self._storage.address}: none of its {num_later} checkpoints is intact; start anew "
                "with another address and another output_dir"
            )
        return found

    def begin(self, found: Manifest | None) -> None:
        """Tries that the address can be written to, and sets checkpoints of later steps than `found` aside
        there: they are damaged, or of a past from which the user has gone back. Then copies `found` if it is
        not there. The folder must exist. Raises UserError.
        """
        with side_group(self._world) as group:
            is_missing = False
            with self._at_start(group):
                if self._world.is_main:
                    self._check_place()
                    steps = self._steps()
                    for step in steps:
                        if step > (found.step if found is not None else -1):
                            place = f"checkpoints/{step_folder_name(step)}"
                            self._storage.rename(f"{place}/{_SEAL}", f"{place}/{_OLD_SEAL}")
                            where = f"{self._storage.address}/{place}"
                            self._world.print(f"set aside: {where}/{_SEAL} -> {_OLD_SEAL}")
                    is_missing = found is not None and found.step not in steps
            if found is not None and group.of_main(is_missing):
                self.send(found.folder, sorted(found.files)[group.rank :: group.size], group)

    # ---- during training

    def send(self, checkpoint: Path, names: Iterable[str], group: SideGroup) -> None:
        """Copies a published checkpoint, and removes older ones at the address by the rules of retention.
        After an error prints a line. names: of the files that this rank copies.
        """
        place = f"checkpoints/{checkpoint.name}"
        what = f"{checkpoint.name} is not copied"
        try:
            with self._world.phase(
                f"copied {checkpoint.name} to {self._storage.address}", in_background=True
            ):
                self._put(place, checkpoint, names, _SEAL, group)
                what = f"{checkpoint.name} is copied, but what it replaces could not be removed"
                with group.together(_ERRORS, why):
                    if self._world.is_main:
                        self._remove_old(step_of(checkpoint))
        except UserError as error:
            self._world.print(f"warning: {what}: {error}; the next checkpoint is copied again")

    def send_export(self) -> None:
        """Copies the export in place of an earlier one. After an error prints a line."""
        export = self._folder.export
        try:
            with (
                self._world.phase(f"copying the export to {self._storage.address}"),
                side_group(self._world) as group,
            ):
                names = sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())
                names.remove(sums.NAME)
                self._put("export", export, names[group.rank :: group.size], sums.NAME, group)
        except UserError as error:
            self._world.print(f"warning: the export is not copied: {error}; {export} has it")

    # ---- how

    @contextmanager
    def _at_start(self, group: SideGroup) -> Iterator[None]:
        """A block of work before training, which ends the run if it fails on a rank."""

        def line_of(error: Exception) -> str:
            if isinstance(error, StorageError):
                return f"{_KEY}: {error}; mend it, or leave the key out"
            return str(error) if isinstance(error, UserError) else f"output_dir: {why(error)}"

        with group.together(_ERRORS, line_of):
            yield

    def _found(self) -> dict[int, set[str]]:
        """Step -> names of the objects of its checkpoint, with a seal or without."""
        found: dict[int, set[str]] = {}
        for name in self._storage.names("checkpoints"):
            if match := re.fullmatch(r"step-([0-9]{8,})/([^/]+)", name):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found

    def _steps(self) -> list[int]:
        """The steps of the checkpoints that have their seal, newest first."""
        return sorted((step for step, names in self._found().items() if _SEAL in names), reverse=True)

    def _check_same_run(self, found: Manifest | None, resume: str, steps: list[int]) -> None:
        """Raises UserError if the checkpoints at the address are of another run than this one."""
        if not steps:
            return
        is_continued = bool(list_checkpoints(self._folder.checkpoints))
        here = _id_of(read_object(self._folder.path / "run.json", missing={})) if is_continued else None
        there = _id_of(object_of(self._storage.read("run.json") or b"") or {})
        is_new = not is_continued and (found is not None or resume != "auto")
        if is_new or (here and there and here != there):
            todo = "choose another" + ", or continue that one with resume=auto" * (resume == "none")
            raise UserError(
                f"{_KEY}: {self._storage.address}: has another run, until step {steps[0]}; {todo}"
            )

    def _check_place(self) -> None:
        """Raises UserError if nothing can be written to the address, or what is written is in output_dir."""
        name = f"{TEMPORARY}{secrets.token_hex(8)}"
        self._storage.write(name, b"")
        is_here = (self._folder.path / name).exists()
        self._storage.remove(name)
        if is_here:
            raise UserError(f"{_KEY}: {self._storage.address}: is output_dir itself; choose another address")

    def _fetch(self, name: str, group: SideGroup) -> Manifest | str:
        """Fetches a checkpoint into output_dir, with the files beside it. Each rank fetches and verifies its
        share of the files. Returns the checkpoint, or what is wrong with it.
        """
        place, final = f"checkpoints/{name}", self._folder.checkpoints / name
        partial = final.with_name(f"{TEMPORARY}{name}")
        folder = partial / name  # the manifest is compared with the name
        self._folder.make(self._world.print)
        try:
            with self._at_start(group):
                if self._world.is_main:
                    remove_leftover(partial)
                    folder.mkdir(parents=True)
                    self._storage.get(place, folder, [_SEAL])
            try:
                with group.together(_ERRORS, why):
                    files = read_manifest(folder).files
            except UserError as error:
                return self._as_there(error, folder, place)
            with self._at_start(group):
                needed, free = sum(entry.size for entry in files.values()), free_bytes(folder)
                if free < needed:
                    what = f"needs {size_text(needed)}, {size_text(free)} are free"
                    raise UserError(f"output_dir: {final}: {what}; make room there and run again")
            with self._at_start(group):
                largest_first = sorted(files, key=lambda name: -files[name].size)
                self._storage.get(place, folder, largest_first[group.rank :: group.size])
            try:
                fetched = verify(folder, group)
            except UserError as error:
                return self._as_there(error, folder, place)
            with self._at_start(group):
                if self._world.is_main:
                    # First: a checkpoint that is there is not fetched again after a kill.
                    self._fetch_beside()
                    if final.exists():
                        self._world.print(f"set aside: {final} -> {set_aside(final).name}")
                    publish_folder(folder, final)
        finally:
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
        return replace(fetched, folder=final)

    def _as_there(self, error: UserError, folder: Path, place: str) -> str:
        """The text of an error of a file that was fetched to `folder`, with its place at the address."""
        return str(error).replace(str(folder), f"{self._storage.address}/{place}")

    def _fetch_beside(self) -> None:
        for name in _BESIDE:
            if (content := self._storage.read(name)) is not None:
                write_bytes(self._folder.path / name, content)

    def _put(self, place: str, folder: Path, names: Iterable[str], seal: str, group: SideGroup) -> None:
        """Copies the files `names` of `folder` on each rank, the files beside it, and the seal."""
        with group.together(_ERRORS, why):
            if self._world.is_main:
                self._storage.remove(place, seal)  # what a broken copy has left
        with group.together(_ERRORS, why):
            self._storage.put(place, folder, names)
        with group.together(_ERRORS, why):
            if self._world.is_main:
                for name in _BESIDE:
                    if kind_of(path := self._folder.path / name) == "a file":
                        self._storage.write(name, path.read_bytes())
                self._storage.write(f"{place}/{seal}", (folder / seal).read_bytes())

    def _remove_old(self, newest: int) -> None:
        """Removes what `retention.remove_old` would, and what broken copies have left."""
        found = self._found()
        losses = dict.fromkeys(step for step, names in found.items() if _SEAL in names and step <= newest)
        if self._cfg.keep_best:
            losses |= {
                step: loss for step, loss in evaluations(self._folder.metrics).items() if step in losses
            }
        goes = losses.keys() - steps_to_keep(losses, self._cfg)
        goes |= {step for step, names in found.items() if not names & {_SEAL, _OLD_SEAL}}
        for step in sorted(goes):
            self._storage.remove(f"checkpoints/{step_folder_name(step)}", _SEAL)


def _id_of(about: Mapping[str, object]) -> object:
    """The id of a run in the content of its run.json; None if it has none."""
    return about.get("id")
