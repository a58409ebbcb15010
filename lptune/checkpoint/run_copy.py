"""The copy of a run in object storage, at `checkpoint.copy_to`: for machines that lose their disks.

    ADDRESS/checkpoints/step-00000100/  the files of a checkpoint as in output_dir; manifest.json is the seal
    ADDRESS/metrics.jsonl, run.json, …  what a run that continues elsewhere reads beside it (_BESIDE)
    ADDRESS/export/                     the export; SHA256SUMS is the seal

Each rank copies the files that it has written, in the thread that wrote them. When all have done so, rank 0
copies the files beside the checkpoint and writes the seal (lptune/base/storage.py). If storage fails
meanwhile, a line says so, and the run goes on from what is on its disk. If it fails before the first step,
when a wrong address can still be mended, the run ends.

A run finds its checkpoint on its disk, or at the address if that has a newer one, which is then fetched into
output_dir and is like any other: every byte is compared with the manifest.

Where machines have a disk each, the copy is the run: a checkpoint that could not be copied is none until it
is, which the next start tries first; the newest at the address is continued, whatever else the disks have,
and the export is whole there alone (parts.py).

An address has one run, by the id in run.json. A run that does not continue that one is refused.
"""

import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lptune.base.errors import UnavailableError, UserError
from lptune.base.files import TEMPORARY, kind_of, object_of, write_bytes
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.base.storage import Storage, StorageError
from lptune.base.text import size_text
from lptune.checkpoint import manifest, parts, sums
from lptune.checkpoint.files import free_bytes, publish_folder, remove_leftover, set_aside, sha256, why
from lptune.checkpoint.hosts import rank_here
from lptune.checkpoint.manifest import FileEntry, Manifest, read_manifest, verify
from lptune.checkpoint.resume import find_checkpoint
from lptune.checkpoint.retention import evaluations, steps_to_keep
from lptune.checkpoint.run_folder import RunFolder
from lptune.config import ExportConfig, RunConfig
from lptune.distributed import SideGroup, World, side_group

_BESIDE = (
    "config.yaml", "precision_plan.json", "metrics.jsonl", "shadow.jsonl", "run.json", "samples.jsonl",
    "reference.safetensors",
)  # fmt: skip
_BESIDE_EACH = ("run.json", "reference.safetensors")
"""Of these, what each machine with its own disk needs."""
_ERRORS = (OSError, UserError)
_KEY = "checkpoint.copy_to"
_SEAL = manifest.NAME
_OLD_SEAL = f"old-{_SEAL}"
"""The name of the seal of a checkpoint that was set aside."""


class RunCopy:
    """The copy of one run, on this rank. All methods are collectives."""

    def __init__(self, address: str, folder: RunFolder, cfg: RunConfig, world: World) -> None:
        """folder: the run's, which need not exist. Raises UserError if nothing here can open the address."""
        self._folder, self._world, self._cfg = folder, world, cfg.checkpoint
        self._num_averaged = cfg.export.average_checkpoints
        self.step = 0
        """The step of the newest checkpoint that this launch found or copied; 0: none."""
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
            if not self._folder.own_disks or resume != "auto":
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
            on_disks = group.of_main(parts.uncopied(self._folder.parts) if self._world.is_main else 0)
            is_later = on_disks > group.of_main(max([least, *steps]) if self._world.is_main else 0)
            if self._folder.own_disks:
                self._check_disks(steps, group, is_later=is_later)
            if is_later and self._finish_copy(on_disks, group):
                steps = [on_disks, *steps]
            if resume != "auto":
                return found
            later = group.all_of_main([step for step in steps if step > least])
            for step in later:
                if fetched := self._fetch(step, group, is_newest=True):
                    found = fetched
                    break
            if found is not None and not self._folder.own_disks:
                self._fetch_older(found.step, steps, group)
        if found is None and later:
            none = f"{_KEY}: {self._storage.address}: none of its {len(later)} checkpoints is intact"
            damaged = damaged or UserError(f"{none}; start anew with another address and output_dir")
        if found is None and damaged is not None:
            raise damaged
        return found

    def begin(self, found: Manifest | None) -> None:
        """Tries that the address can be written to, and sets checkpoints of later steps than `found` aside
        there: they are damaged, or of a past from which the user has gone back. Then copies `found` if it is
        not there. The folder must exist. Raises UserError.
        """
        with side_group(self._world) as group:
            is_missing = False
            self.step = found.step if found is not None else 0
            with self._at_start(group):
                if self._world.is_main:
                    self._check_place()
                    for step in self._steps():
                        if step > (found.step if found is not None else -1):
                            self._set_aside(step)
                    if found is not None:  # of another past, a step has another manifest
                        there = self._storage.read(f"{_place(found.step)}/{_SEAL}")
                        is_missing = there != (found.folder / _SEAL).read_bytes()
            if found is not None and group.of_main(is_missing):
                names = sorted(found.files)[group.rank :: group.size]
                self.send(found.step, found.folder, names, group)

    # ---- during training

    def send(self, step: int, checkpoint: Path, names: Iterable[str], group: SideGroup) -> None:
        """Copies a published checkpoint, and removes older ones at the address by the rules of retention.
        After an error prints a line. names: of the files that this rank copies. Where machines have a disk
        each, `checkpoint` is what this one has written.
        """
        name, what = step_folder_name(step), "is not copied"
        is_kept = is_copied = False
        final = checkpoint.with_name(name) if self._folder.own_disks else checkpoint
        try:
            with self._world.phase(f"copied {name} to {self._storage.address}", in_background=True):
                with group.together(_ERRORS, why):
                    if self._folder.own_disks and self._folder.prepares:
                        parts.publish(checkpoint, final)
                is_kept = self._folder.own_disks
                self._put(_place(step), final, names, _SEAL, group)
                what, is_copied = "is copied, but what it replaces could not be removed", True
                self.step = step
                with group.together(_ERRORS, why):
                    if self._world.is_main:
                        self._remove_old(step)
        except UserError as error:
            again = "tried again with the next checkpoint, or when the run starts again"
            if is_kept and not is_copied:
                again = "the disks keep it until a later one is copied; the next start copies it"
            self._world.print(f"warning: {name} {what}: {error}; {again}")
        if self._folder.own_disks and self._folder.prepares:
            if is_kept:
                parts.settle(final, is_copied=is_copied)
            else:  # a machine's disk has not taken it: the part before it stays on all
                for path in (checkpoint, final):
                    shutil.rmtree(path, ignore_errors=True)

    def to_export(self, step: int, count: int) -> list[Manifest]:
        """The checkpoint of `step` and the `count - 1` before it, on machines with a disk each. Raises
        UserError if the address does not have them.
        """
        with side_group(self._world) as group:
            steps = list[int]()
            with self._at_start(group):
                if self._world.is_main:
                    steps = [each for each in self._steps() if each <= step][:count]
                    if len(steps) < count or steps[0] != step:
                        has = ", ".join(map(str, steps)) or "none"
                        raise UnavailableError(  # the steps may only have to be done and copied again
                            f"{_KEY}: {self._storage.address}: the export needs the checkpoint of step {step}"
                            + f" and the {count - 1} before it" * (count > 1)
                            + f", and there are those of {has}; run again"
                        )
            found = [self._assemble(each, group) for each in group.all_of_main(steps)]
        for each in found:
            if isinstance(each, UserError):
                raise each
        return [each for each in found if isinstance(each, Manifest)]

    def best(self) -> int:
        """The step of the checkpoint at the address with the lowest eval_loss; the newest of equal ones.
        Raises UserError if there is none.
        """

        def find() -> int:
            if not (losses := self._losses(self._steps())):
                none = "has no checkpoint to export; run again"
                raise UnavailableError(f"{_KEY}: {self._storage.address}: {none}")
            return min(losses, key=lambda step: (losses[step] is None, losses[step] or 0.0, -step))

        return self._folder.on_main(find)

    def is_exported(self, step: int, cfg: ExportConfig) -> bool:
        """`RunFolder.is_exported`, of the export at the address."""

        def holds() -> bool:
            said, seal = (self._storage.read(name) for name in ("export.json", f"export/{sums.NAME}"))
            if said is None or seal is None:
                return False
            self._folder.set_old_export_aside(said)
            write_bytes(self._folder.path / "export.json", said)
            return self._folder.says_exported(step, cfg)

        return bool(self._folder.on_main(holds))

    def publish_export(self, folder: Path, names: Iterable[str], group: SideGroup) -> None:
        """Copies an export of which `folder` on each machine has the files of its ranks, and removes it
        there. names: of this rank's files. Raises UserError.
        """
        try:
            with self._world.phase(f"copying the export to {self._storage.address}"):
                self._put("export", folder, names, sums.NAME, group)
        except UserError as error:
            raise type(error)(f"{_KEY}: the export is not copied: {error}; run again to export") from None
        finally:
            if self._folder.prepares:
                shutil.rmtree(folder, ignore_errors=True)

    def place(self, name: str) -> str:
        """What is called `name` at the address, for the user."""
        return f"{self._storage.address}/{name}"

    def send_export(self) -> None:
        """Copies the export in place of an earlier one. After an error prints a line. Where machines have a
        disk each, it is there, and export.json is missing, which says what it is.
        """
        export = self._folder.export
        if self._folder.own_disks:
            said = self._folder.path / "export.json"
            self._folder.on_main(lambda: self._storage.write(said.name, said.read_bytes()))
            return
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
                todo = "wait for it" if isinstance(error, UnavailableError) else "mend it"
                other = "and run again" if self._folder.own_disks else "or leave the key out"
                return f"{_KEY}: {error}; {todo}, {other}"
            line = str(error) if isinstance(error, UserError) else f"output_dir: {why(error)}"
            is_here = self._folder.own_disks and line.startswith("output_dir: ")
            return self._folder.on_this_machine(line) if is_here else line

        with group.together(_ERRORS, line_of):
            yield

    def _found(self) -> dict[int, set[str]]:
        """Step -> names of the objects of its checkpoint, with a seal or without."""
        found: dict[int, set[str]] = {}
        for name in self._storage.sizes("checkpoints"):
            if match := re.search(r"(?:^|/)step-([0-9]{8,})/([^/]+)$", name):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found

    def _steps(self) -> list[int]:
        """The steps of the checkpoints that have their seal, newest first."""
        return sorted((step for step, names in self._found().items() if _SEAL in names), reverse=True)

    def _check_same_run(self, found: Manifest | None, resume: str, steps: list[int]) -> None:
        """Raises UserError if the checkpoints at the address are of another run than this one."""
        if not steps:
            return
        is_continued = self._folder.has_steps()
        here, there = self._ids()
        is_new = not is_continued and (found is not None or resume != "auto")
        if is_new or (is_continued and here and there and here != there):
            todo = "choose another" + ", or continue that one with resume=auto" * (resume == "none")
            what = f"has another run, until step {steps[0]}"
            raise UserError(f"{_KEY}: {self._storage.address}: {what}; {todo}")

    def _ids(self) -> tuple[str | None, str | None]:
        """The ids of the run in output_dir and of that at the address."""
        there = object_of(self._storage.read("run.json") or b"") or {}
        return self._folder.run_id(), there.get("id")

    def _check_disks(self, steps: list[int], group: SideGroup, *, is_later: bool) -> None:
        """Raises UserError if a machine's disk has another run, or this one of another address; or if machine
        0 has a checkpoint that is newer than any at the address, from the time when it was the only machine.
        is_later: the disks have a step that is not copied yet.
        """
        ids: tuple[object, ...] = ()
        with self._at_start(group):
            if self._world.is_main:
                ids = self._ids()
        ids, num_there = self._world.gather(ids)[0], group.of_main(len(steps))
        with self._at_start(group):
            if not self._folder.prepares:
                return
            where = f"output_dir: {self._folder.path}"
            here = self._folder.run_id()
            found = [*list_checkpoints(self._folder.checkpoints), *list_checkpoints(self._folder.parts)]
            # A step that was never copied is nothing without machine 0, if that has lost it.
            was_there = not all(map(parts.is_uncopied, found))
            if found and (here is None or here not in ids) and (was_there or any(ids)):
                raise UserError(f"{where} has another run; remove it there, or choose another folder")
            whole = list_checkpoints(self._folder.checkpoints) if self._world.is_main else []
            if whole and step_of(whole[0]) > max(steps, default=-1):
                what = f"has {whole[0].name}, which is not at {self._storage.address}"
                raise UserError(f"{where} {what}; start that machine alone once, which copies it")
            if not num_there and not is_later and was_there:
                what = f"has part of a run of which {self._storage.address} has no checkpoint"
                raise UserError(f"{where} {what}; give its own {_KEY}, or choose another folder")

    def _finish_copy(self, step: int, group: SideGroup) -> bool:
        """Copies a step that the machines have on their disks and the address lacks, since storage failed or
        all were killed. Returns whether they have it whole; a line says so if not. Raises UserError if it
        cannot be copied.
        """
        folder, files = self._folder.parts / step_folder_name(step), dict[str, tuple[int, str]]()
        with self._at_start(group), suppress(UserError):  # with a damaged manifest, it is not whole
            if self._world.is_main:
                listed = read_manifest(folder, is_part=True).files
                files = {name: (entry.size, entry.sha256) for name, entry in listed.items()}
        entries = {name: FileEntry(*entry) for name, entry in self._world.gather(files)[0].items()}
        rank, num_ranks = rank_here()
        mine = list[str]()
        with self._at_start(group):
            here = [name for name in entries if (folder / name).is_file()][rank::num_ranks]
            mine = parts.intact(folder, {name: entries[name] for name in here})
        found = self._world.gather(mine)
        if not entries or (lost := entries.keys() - set().union(*found)):
            what = f"{len(lost)} of its {len(entries)} files are" if entries else "its manifest is"
            line = f"{folder.name} was not copied before, and {what} not on these machines' disks"
            self._world.print(f"warning: checkpoint passed over: {line}")
            return False
        earlier = set().union(*found[: group.rank])  # machines may share a disk
        try:
            with self._world.phase(f"copying {folder.name} to {self._storage.address}"):
                self._put(_place(step), folder, set(mine) - earlier, _SEAL, group)
        except UserError as error:
            what = f"{folder.name} is on the machines' disks alone and is not copied: {error}"
            raise type(error)(f"{_KEY}: {what}; run again") from None
        if self._folder.prepares:
            parts.settle(folder, is_copied=True)
        return True

    def _check_place(self) -> None:
        """Raises UserError if nothing can be written to the address, or what is written is in output_dir."""
        name = f"{TEMPORARY}{secrets.token_hex(8)}"
        self._storage.write(name, b"")
        is_here = (self._folder.path / name).exists()
        self._storage.remove(name)
        if is_here:
            raise UserError(f"{_KEY}: {self._storage.address}: is output_dir itself; choose another address")

    def _fetch_older(self, newest: int, steps: Sequence[int], group: SideGroup) -> None:
        """Fetches what a run on one disk would still have and its export may need: the best checkpoints, and
        those whose mean is exported. steps: those at the address, on the main rank.
        """
        missing = list[int]()
        with self._at_start(group):
            if self._world.is_main:
                here = {step_of(path) for path in list_checkpoints(self._folder.checkpoints)}
                losses = self._losses(step for step in {*here, *steps} if step <= newest)
                needed = replace(self._cfg, keep_last=self._num_averaged, keep_every=0)
                missing = sorted(steps_to_keep(losses, needed) - here)
        for step in group.all_of_main(missing):
            self._fetch(step, group, is_newest=False)

    def _fetch(self, step: int, group: SideGroup, *, is_newest: bool) -> Manifest | None:
        """Fetches a checkpoint into output_dir, the newest with the files beside it. None: it is damaged, and
        a line says so.
        """
        self._folder.make(self._world.print)
        place, final = _place(step), self._folder.steps / step_folder_name(step)
        partial = final.with_name(f"{TEMPORARY}{final.name}")
        folder = partial / final.name  # the manifest is compared with the name
        try:
            with self._world.phase(f"fetching {final.name} from {self._storage.address}"):
                if self._folder.own_disks:
                    fetched = self._assemble(step, group)
                else:
                    fetched = self._receive(place, folder, group)
            if isinstance(fetched, UserError):
                fault = str(fetched).replace(str(folder), f"{self._storage.address}/{place}")
                self._world.print(f"warning: checkpoint passed over: {fault}")
                return None
            if self._folder.own_disks:
                with self._at_start(group):
                    if self._folder.prepares:
                        beside = _BESIDE if self._world.is_main else _BESIDE_EACH
                        self._storage.get("", self._folder.path, beside)
                return fetched
            with self._at_start(group):
                if self._world.is_main:
                    if is_newest:  # first: after a kill, a checkpoint that is there is not fetched again
                        self._storage.get("", partial, _BESIDE)
                        for name in _BESIDE:
                            with suppress(FileNotFoundError):
                                (partial / name).replace(self._folder.path / name)
                    if final.exists():
                        self._world.print(f"set aside: {final} -> {set_aside(final).name}")
                    publish_folder(folder, final)
        finally:
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
        return replace(fetched, folder=final)

    def _assemble(self, step: int, group: SideGroup) -> Manifest | UserError:
        """Has each file of a checkpoint be on some machine's disk, verified, and manifest and state.json on
        all. Returns what is wrong with it if it is damaged. (parts.py)
        """
        place, folder = _place(step), self._folder.steps / step_folder_name(step)
        with self._at_start(group):
            if self._folder.prepares:
                parts.begin(self._storage, place, folder, _SEAL)
        try:
            with group.together(_ERRORS, why):
                part = parts.Part(self._storage, place, read_manifest(folder, is_part=True))
        except UserError as error:
            return UserError(str(error).replace(str(folder), f"{self._storage.address}/{place}"))
        rank, num_ranks = rank_here()
        with self._at_start(group):
            here = part.present()
        with self._at_start(group):
            part.remove_others(here[rank::num_ranks])
        here = part.present() if self._folder.prepares else []
        held = {name for names in self._world.gather(here) for name in names}
        with self._at_start(group):
            damage = part.fetch_missing(held, group.rank, group.size)
        line = group.first_line(damage)
        return part.manifest if line is None else UserError(line)

    def _receive(self, place: str, folder: Path, group: SideGroup) -> Manifest | UserError:
        """Fetches a checkpoint to `folder`, each rank its share of the files, and verifies it. Returns what
        is wrong with it if it is damaged.
        """
        with self._at_start(group):
            if self._world.is_main:
                remove_leftover(folder.parent)
                folder.mkdir(parents=True)
                self._storage.get(place, folder, [_SEAL])
        try:
            with group.together(_ERRORS, why):
                files = read_manifest(folder).files
        except UserError as error:
            return error
        with self._at_start(group):
            needed, free = sum(entry.size for entry in files.values()), free_bytes(folder)
            if self._world.is_main and free < needed:
                what = f"{folder.name} needs {size_text(needed)}, {size_text(free)} are free"
                raise UserError(f"output_dir: {self._folder.path}: {what}; make room there and run again")
        with self._at_start(group):
            largest_first = sorted(files, key=lambda name: -files[name].size)  # as `verify` shares them
            had = self._folder.parts / folder.name  # from the time of a disk each
            names = list[str]()
            for name in largest_first[group.rank :: group.size]:
                if (had / name).is_file() and sha256(had / name) == files[name].sha256:
                    (had / name).replace(folder / name)
                else:
                    names.append(name)
            self._storage.get(place, folder, names)
        try:
            return verify(folder, group)
        except UserError as error:
            return error

    def _put(self, place: str, folder: Path, names: Iterable[str], seal: str, group: SideGroup) -> None:
        """Copies the files `names` of `folder` on each rank, the files beside it, and the seal."""
        with group.together(_ERRORS, why):
            if self._world.is_main:
                here, there = self._ids()
                if here != (there or here) and self._steps():  # it began after this one had looked
                    raise UserError(f"{self._storage.address}: has another run; choose another address")
                for step, found in self._found().items():
                    if not found & {_SEAL, _OLD_SEAL}:  # left by a broken copy; its room may be needed
                        self._storage.remove(_place(step))
                self._storage.remove(place, seal)
        with group.together(_ERRORS, why):
            self._storage.put(place, folder, names)
        with group.together(_ERRORS, why):
            if self._world.is_main:
                for name in _BESIDE:
                    if kind_of(path := self._folder.path / name) == "a file":
                        self._storage.write(name, path.read_bytes())
                self._storage.write(f"{place}/{seal}", (folder / seal).read_bytes())

    def _remove_old(self, newest: int) -> None:
        """Removes what `retention.remove_old` would."""
        losses = self._losses(step for step in self._steps() if step <= newest)
        for step in sorted(losses.keys() - steps_to_keep(losses, self._cfg)):
            self._storage.remove(_place(step), _SEAL)

    def _losses(self, steps: Iterable[int]) -> dict[int, float | None]:
        """The eval_loss of each step, where it decides what is kept; None: it has none."""
        known = evaluations(self._folder.metrics) if self._cfg.keep_best else {}
        return {step: known.get(step) for step in steps}

    def _set_aside(self, step: int) -> None:
        """Has a checkpoint count as none, and keeps its files until the step is saved again."""
        self._storage.rename(f"{_place(step)}/{_SEAL}", f"{_place(step)}/{_OLD_SEAL}")
        self._world.print(f"set aside: {self._storage.address}/{_place(step)}/{_SEAL} -> {_OLD_SEAL}")


def _place(step: int) -> str:
    """Where a checkpoint is, from the address."""
    return f"checkpoints/{step_folder_name(step)}"
