"""A checkpoint whose machines have a disk each: whole at `checkpoint.copy_to`, in parts on the disks.

    OUTPUT_DIR/parts/step-00000100/   on each machine: the files that its ranks wrote or needed

Each rank writes its files to its machine's disk and copies them to the address; the manifest there is the
only seal (run_copy.py). A part is no checkpoint, and nothing takes it for one. It saves fetching: a file
counts if it has the digest that the manifest says, whenever and by whomever it was written. And it outlives a
failure of the storage: until the seal is there, a part has a mark, and a run that finds one on machine 0
copies that step first, if the machines have all of its files. There is one part on a disk, the newest.

A run that continues first has its machines fetch what none of them has, each file by one rank: that of its
writer's number, if there are so many. So every byte is verified before the first step, and a machine with an
empty disk fetches what it has lost. While it loads, a rank fetches what it needs and its machine lacks: with
other ranks the files of which it needs some rows, for the export those with weights.
"""

import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from lptune.base.cores import in_threads
from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY, Lock, kind_of
from lptune.base.step_folders import list_checkpoints, step_of
from lptune.base.storage import Storage
from lptune.checkpoint.files import num_threads, publish_folder, remove_leftover
from lptune.checkpoint.hosts import rank_here
from lptune.checkpoint.manifest import FileEntry, Manifest, check_file

_FETCHED = f"{TEMPORARY}fetched"
_UNCOPIED = f"{TEMPORARY}uncopied"
"""The mark of a part of which the address has no seal yet."""
_AT_ONCE = 2


class DamagedError(UserError):
    """A file at the address is missing or not as the manifest says."""


class Part:
    """What is on this machine's disk of one checkpoint."""

    def __init__(self, storage: Storage, place: str, manifest: Manifest) -> None:
        """place: of the checkpoint, from the address. manifest: in the folder of the part."""
        self._storage, self._place, self._stored = storage, place, manifest
        self.manifest = replace(manifest, fetch=self.fetch)

    def fetch(self, name: str) -> None:
        """Fetches a file that is not here, for all ranks of this machine. Raises DamagedError, or as
        `Storage.get` does.
        """
        file, fetched = self._stored.folder / name, self._stored.folder / _FETCHED
        fetched.mkdir(exist_ok=True)
        with Lock(fetched / f"{name}.lock", wait=True):
            if file.is_file():
                return
            self._storage.get(self._place, fetched, [name])
            try:
                check_file(fetched / name, self._stored.files[name])
            except UserError as error:
                there = f"{self._storage.address}/{self._place}"
                raise DamagedError(str(error).replace(str(fetched), there)) from None
            (fetched / name).replace(file)

    def present(self) -> list[str]:
        """The files of the checkpoint that are here."""
        return [name for name in self._stored.files if (self._stored.folder / name).is_file()]

    def remove_others(self, names: Iterable[str]) -> None:
        """Removes those of `names` whose bytes are not the checkpoint's."""
        files = {name: self._stored.files[name] for name in names}
        for name in files.keys() - set(intact(self._stored.folder, files)):
            (self._stored.folder / name).unlink(missing_ok=True)

    def fetch_missing(self, held: set[str], rank: int, num_ranks: int) -> str | None:
        """Fetches this rank's share of the files that are not in `held`, those of all machines. Returns what
        is damaged.
        """
        mine = [name for name in self._stored.files if name not in held and _writer(name) % num_ranks == rank]
        if rank_here()[0] == 0:
            mine.append("state.json")
        try:
            in_threads([partial(self.fetch, name) for name in mine], _AT_ONCE)
        except DamagedError as error:
            return str(error)
        return None


def begin(storage: Storage, place: str, folder: Path, seal: str) -> None:
    """Puts the manifest of the address, the object `seal`, into the part `folder`. Follows no link, and
    removes those in it: the files of a checkpoint would seem damaged at the address.
    """
    for path in (folder, *folder.glob("*")):
        if path.is_symlink():
            path.unlink(missing_ok=True)
    new = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    new.mkdir(parents=True)
    with suppress(OSError):  # another machine on this disk has done it
        remove_leftover(folder / _FETCHED)
    storage.get(place, new, [seal])
    (new / seal).replace(folder / seal)
    new.rmdir()
    (folder / _UNCOPIED).unlink(missing_ok=True)


def intact(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """The names of those of `files` that `folder` has, byte by byte."""

    def is_intact(name: str) -> bool:
        with suppress(UserError):
            check_file(folder / name, files[name])
            return True
        return False

    with ThreadPoolExecutor(num_threads()) as pool:  # hashing releases the GIL
        found = pool.map(is_intact, files)
        return [name for name, there in zip(files, found, strict=True) if there]


def publish(written: Path, final: Path) -> None:
    """Gives a part its name and the mark. All machines must have written all of their files."""
    with suppress(FileNotFoundError, FileExistsError):  # another machine on this disk has done it
        (written / _UNCOPIED).touch()
        publish_folder(written, final)


def settle(part: Path, *, is_copied: bool) -> None:
    """Removes all other parts, and the mark if the address has the seal."""
    if is_copied:
        (part / _UNCOPIED).unlink(missing_ok=True)
    empty(part.parent, [part])


def is_uncopied(part: Path) -> bool:
    """Whether a part has the mark, so that the address has no seal of its step."""
    return bool(kind_of(part / _UNCOPIED))


def uncopied(folder: Path) -> int:
    """The newest step of the parts in `folder` that have the mark; -1: none has it."""
    return max(map(step_of, filter(is_uncopied, list_checkpoints(folder))), default=-1)


def empty(folder: Path, keep: Iterable[Path] = ()) -> None:
    """Removes all parts in `folder` but those of `keep`, and what kills left of others. What else is there
    is not lptune's and stays. Another machine may be doing the same.
    """
    for path in {*list_checkpoints(folder), *folder.glob(f"{TEMPORARY}*")} - set(keep):
        shutil.rmtree(path, ignore_errors=True)


def _writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint, by its name."""
    match = re.search(r"-([0-9]{5})[.-]", name)
    return int(match[1]) if match else 0
