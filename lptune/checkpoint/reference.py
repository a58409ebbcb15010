"""reference.safetensors: log-probabilities that a run computed with the weights of its base checkpoint.

A preference loss compares the model with the model before training. The numbers for all answers are
computed once, before the first step, and kept in the run's folder: 4 bytes per document. A resumed run reads
them, on any number of ranks, and so continues with the same bits.

The file's metadata name what the numbers depend on. If any of this has changed, or if the file is missing or
damaged, the run computes the numbers again, from the base checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lptune.base.files import kind_of, parse_json, write_bytes
from lptune.checkpoint.run_folder import RunFolder
from lptune.distributed import World

_KEY = "lptune"
"""One key, since the order of several is random, and equal numbers are to give equal bytes."""


class Rows(Protocol):
    """What the file asks of the rows of a run (data.Rows)."""

    @property
    def num_documents(self) -> int: ...


class ReferenceFile:
    """The file of one run, on this rank. All ranks call its methods together."""

    def __init__(self, folder: RunFolder, world: World, made_with: Mapping[str, object]) -> None:
        """made_with: what the numbers depend on, by name."""
        self._folder, self._world = folder, world
        self._made_with = {key: str(value) for key, value in made_with.items()}
        self._computed: dict[str, Tensor] = {}

    def read(self, train: Rows, held_out: Rows | None, *sizes: int) -> dict[str, Tensor] | None:
        """The tensors of an earlier launch, on the CPU; None if they are to be computed. Prints a line if
        there is a file that cannot be used. A collective.

        sizes: the shape of what belongs to one document; none for a number.
        """
        rows = {"train": train, "held_out": held_out}
        shapes = {name: (each.num_documents, *sizes) for name, each in rows.items() if each is not None}
        found = read_reference(self._folder.reference, self._made_with, shapes)
        failed = torch.tensor(float(isinstance(found, str)), device=self._world.device)
        self._world.max_(failed)
        if isinstance(found, str):
            if found:
                self._world.print(f"note: {self._folder.reference} is computed again: {found}")
            return None
        return None if failed.item() else found

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Has `write` write `tensors`, which are equal on all ranks and on the CPU."""
        self._computed = dict(tensors)

    def write(self) -> None:
        """Writes what `keep` was given, if anything. The run's folder must exist. A collective."""
        if self._computed:
            path, computed = self._folder.reference, self._computed
            self._folder.on_main(lambda: write_reference(path, computed, self._made_with))


def read_reference(
    path: Path, made_with: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor] | str:
    """The tensors of the file, or why it cannot be used; an empty text if there is no file.

    made_with: what the numbers depend on, by name. shapes: of the tensors.
    """
    if (found := kind_of(path)) != "a file":
        return found and f"it is {found}"
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = parse_json(file.metadata()[_KEY])
        digest, stored = about["digest"], dict(about["made_with"])
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error!s:.80})"
    forms = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    if forms != {name: (torch.float32, shape) for name, shape in shapes.items()}:
        return "its tensors have other names, shapes or dtypes than this run's"
    if digest != _digest(tensors):
        return "it is damaged: its numbers do not match their digest"
    if not all(each.isfinite().all() for each in tensors.values()):
        return "some of its numbers are not finite"
    changed = [
        f"{key} {stored.get(key)} (now {value})"
        for key, value in made_with.items()
        if stored.get(key) != value
    ]
    return f"it was computed with {', '.join(changed)}" if changed else tensors


def write_reference(path: Path, tensors: Mapping[str, Tensor], made_with: Mapping[str, str]) -> None:
    """Writes the file durably; `path` has the old or the new content. The tensors are on the CPU."""
    about = {"digest": _digest(tensors), "made_with": dict(made_with)}
    write_bytes(path, save(dict(tensors), metadata={_KEY: json.dumps(about)}))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        sha.update(tensors[name].contiguous().numpy().tobytes())
    return sha.hexdigest()
