"""reference.safetensors: log-probabilities that a run computed with the weights of its base checkpoint.

A preference loss compares the model with the model before training. The numbers for all answers are
computed once, before the first step, and kept in the run's folder: 4 bytes per document. A resumed run reads
them, on any number of ranks, and so continues with the same bits.

The file's metadata name what the numbers depend on. If any of this has changed, or if the file is missing or
damaged, the run computes the numbers again, from the base checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lptune.checkpoint.files import fsync_path, read_bytes
from lptune.checkpoint.run_folder import RunFolder
from lptune.config import MEBI, TEMPORARY, UserError, kind_of, named, open_regular
from lptune.distributed import World

_KEY = "lptune"
"""One key, since the order of several is random, and equal numbers are to give equal bytes."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which is JSON."""


class ReferenceFile:
    """The file of one run, on this rank. All ranks call its methods together."""

    def __init__(self, folder: RunFolder, world: World, made_with: Mapping[str, object]) -> None:
        """made_with: what the numbers depend on, by name."""
        self._folder, self._world = folder, world
        self._made_with = {key: str(value) for key, value in made_with.items()}
        self._is_current = False

    def read(self) -> dict[str, Tensor] | None:
        """The tensors of an earlier launch, on the CPU; None if they are to be computed. Prints a line if
        there is a file that cannot be used. A collective.
        """
        found = read_reference(self._folder.reference, self._made_with)
        failed = torch.tensor(float(isinstance(found, str)), device=self._world.device)
        self._world.max_(failed)
        self._is_current = not failed.item()
        if isinstance(found, str):
            if found:
                self._world.print(f"note: {self._folder.reference} is computed again: {found}")
            return None
        return found if self._is_current else None

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes `tensors`, equal on all ranks and on the CPU, unless `read` returned them. The run's folder
        must exist (`Run.begin`). A collective.
        """
        if tensors and not self._is_current:
            with self._folder.together():
                if self._world.is_main:
                    self._folder.check_held()
                    write_reference(self._folder.reference, tensors, self._made_with)


def read_reference(path: Path, made_with: Mapping[str, str]) -> dict[str, Tensor] | str:
    """The tensors of the file, or why it cannot be used; an empty text if there is no file.

    made_with: what the numbers depend on, by name.
    """
    if not kind_of(path):
        return ""
    try:
        content = read_bytes(path, 1024 * MEBI)
        tensors = load(content)
        stop = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        about = json.loads(json.loads(content[_LENGTH_BYTES:stop])["__metadata__"][_KEY])
        digest, stored = about["digest"], dict(about["made_with"])
    except (SafetensorError, UserError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error!s:.80})"
    if digest != _digest(tensors):
        return "it is damaged: its numbers do not match their digest"
    changed = [
        f"{key} {stored.get(key)} (now {value})"
        for key, value in made_with.items()
        if stored.get(key) != value
    ]
    return f"it was computed with {', '.join(changed)}" if changed else tensors


def write_reference(path: Path, tensors: Mapping[str, Tensor], made_with: Mapping[str, str]) -> None:
    """Writes the file durably; `path` has the old or the new content. The tensors are on the CPU."""
    about = {"digest": _digest(tensors), "made_with": dict(made_with)}
    partial = path.with_name(f"{TEMPORARY}{path.name}")
    with named(partial):
        partial.unlink(missing_ok=True)
        with open(open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(save(dict(tensors), metadata={_KEY: json.dumps(about)}))
    fsync_path(partial)
    partial.replace(path)
    fsync_path(path.parent)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        sha.update(tensors[name].contiguous().numpy().tobytes())
    return sha.hexdigest()
