"""What is damaged of a run, a checkpoint or an export in object storage, for `lptune verify s3://…`.

One listing tells which files are missing or have another size. The others are read once, as a stream, and
compared with the digest in the seal. Only seals come to the disk, in a temporary folder.
"""

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.storage import Storage, StorageError
from lptune.checkpoint import manifest, sums
from lptune.checkpoint.manifest import FileEntry

_AT_ONCE = 2
_SEALS = re.compile(rf"(checkpoints/step-[0-9]+/)?{manifest.NAME}|(export/)?{sums.NAME}")


def verify_address(address: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields for each checkpoint and the export at `address`: where it is, what it is, and a line for each
    damaged file. Raises UserError if there is none, or if the storage cannot be read.
    """
    storage = Storage(address)
    sizes = storage.sizes()
    seals = sorted(filter(_SEALS.fullmatch, sizes))
    if not seals:
        raise UserError(f"{address}: has neither a checkpoint with a {manifest.NAME} nor an export")
    for seal in seals:
        where, faults = f"{storage.address}/{seal}".rpartition("/")[0], list[str]()
        about, files = "", dict[str, FileEntry]()
        try:
            about, files = _listed(storage, seal, sizes, where)
        except UserError as error:
            if isinstance(error, StorageError):
                raise
            faults = [str(error)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(partial(_fault, storage, sizes), files, files.values())
            faults += [f"{storage.address}/{fault}" for fault in found if fault]
        if not faults or seal in storage.sizes():  # a run that trains removes old ones
            yield where, about, faults


def _fault(storage: Storage, sizes: dict[str, int], name: str, entry: FileEntry) -> str:
    if name not in sizes:
        return f"{name}: is missing"
    if sizes[name] != entry.size:
        return f"{name}: has {sizes[name]} bytes instead of {entry.size}"
    return "" if storage.sha256(name) == entry.sha256 else f"{name}: its content does not match its sha256"


def _listed(
    storage: Storage, seal: str, sizes: dict[str, int], where: str
) -> tuple[str, dict[str, FileEntry]]:
    """What `seal` is of, in words, and the files that it lists. Raises UserError if it is damaged."""
    place, _, name = seal.rpartition("/")
    before = place + "/" * bool(place)
    with tempfile.TemporaryDirectory() as temporary:
        # A manifest is compared with the name of its folder, which may be "..".
        folder = Path(temporary, where.rpartition("/")[2].strip(".") or "export")
        folder.mkdir()
        storage.get(place, folder, [name])
        try:
            if name == sums.NAME:  # without sizes
                digests = sums.read_sums(folder)[0].items()
                files = {before + each: FileEntry(sizes.get(before + each, 0), it) for each, it in digests}
                return f"{len(files)} files as they were exported", files
            found = manifest.read_manifest(folder, is_part=True)
        except UserError as error:
            raise UserError(str(error).replace(str(folder), where)) from None
    about = f"step {found.step}, {len(found.shards)} tensors of {found.world_size} rank(s)"
    return f"{about}, all bytes as saved", {before + each: entry for each, entry in found.files.items()}
