"""Loads a checkpoint: each rank reads its own boxes of every tensor, from the files of any number of ranks.

Each file is mapped into memory once, and its tensors are views of the mapping. So data is copied only once:
from the mapping (disk, or the page cache that verification has just filled) to its destination, with a cast.
Most of the time goes into touching new memory, page by page; several threads do this in parallel.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lptune.base.cores import in_threads
from lptune.base.errors import UserError
from lptune.checkpoint.files import num_threads
from lptune.checkpoint.manifest import Manifest, Shard
from lptune.checkpoint.state import read_state
from lptune.checkpoint.stored import ConvertsState, Stored, listing, named, names_of, parameters_of
from lptune.distributed import Piece
from lptune.linear import dequantized, fill_stored, is_stored_in_place, stored_beside, weights_changed

_OPTIMIZER_FILES = "optimizer-"


def load_state(
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fills parameters and optimizer state from a verified checkpoint. Each rank reads its own part.

    optimizer: see `stored.ListsState`. tensors: further tensors, as in `CheckpointWriter.save`. They are
    filled in place if the checkpoint has them; a run with another precision stored others, or none.

    Parameters may have any float dtype, as in `load_weights`. Raises UserError if a parameter or a tensor of
    the optimizer is missing in the checkpoint or has another shape there, if the latter has another dtype, or
    if the checkpoint has the state of another optimizer.
    """
    saved, num_updates = manifest.shards.keys(), read_state(manifest).num_updates
    files = StoredFiles(manifest)
    listed, names = set[str](), names_of(model)
    if isinstance(optimizer, ConvertsState):
        for part in optimizer.converted(names, saved, num_updates):
            _load(files, named(model, part), [], casts=False)
            listed |= part.keys()
    optimized = listing(optimizer).restored(names, saved, num_updates)
    _check_all_listed(manifest, listed | optimized.keys(), optimizer)
    _load(files, parameters_of(model), [], casts=True)  # float32 and bfloat16 ones: optimizer.master
    _load(files, named(model, optimized), named(model, tensors), casts=False)
    weights_changed(model)


def load_weights(
    manifest: Manifest, model: nn.Module, tensors: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """`load_state` without an optimizer, for a model that is not trained. Parameters may have any float
    dtype: the stored float32 values are cast to it.
    """
    _load(StoredFiles(manifest), parameters_of(model), named(model, tensors), casts=True)
    weights_changed(model)


def _load(files: "StoredFiles", needed: Sequence[Stored], optional: Sequence[Stored], *, casts: bool) -> None:
    """Fills `needed`, and those of `optional` that the checkpoint has. casts: from any float dtype."""
    optional = [each for each in optional if each.name in files.manifest.shards]
    reads: list[Callable[[], None]] = []
    for each in itertools.chain(needed, optional):
        if is_stored_in_place(each.tensor):
            reads.append(_read_later(files, each, casts))
        else:
            _fill(files, each, casts)
    # At least two; more if torch's threads leave cores of this rank idle.
    in_threads(reads, max(2, min(8, num_threads() // torch.get_num_threads())))


class StoredFiles:
    """Reads tensors of a checkpoint, from files that stay mapped as long as this object exists.

    Several threads can use it at the same time.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: dict[str, Any] = {}
        self._opening = threading.Lock()

    @torch.no_grad()  # here, because grad mode is a setting of each thread
    def read(
        self, name: str, pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype | None
    ) -> None:
        """Fills `pieces` of the tensor `name`, with a cast to their dtype.

        shape, dtype: of the whole tensor in the checkpoint; dtype None: any float dtype. Raises UserError if
        the checkpoint has another shape or dtype, or does not have each element of `pieces` exactly once.
        """
        if 0 in shape:
            return  # the tensor has no element, so no file contains it
        shards, stored = self.manifest.shards.get(name, []), self.manifest.extents(name)
        needed = _extents(shape)[: len(stored)]
        if stored != needed:
            held, wanted = (" x ".join(map(str, sizes)) for sizes in (stored, needed))
            raise UserError(
                f"{self.manifest.folder}: holds {held} elements of {name!r} where {wanted} are needed"
            )
        num_needed = num_read = 0
        for piece in pieces:
            num_needed += piece.values.numel()
            num_read += sum(self._read_overlap(name, shard, piece, shape, dtype) for shard in shards)
        if num_read != num_needed:
            raise UserError(
                f"{self.manifest.folder}: holds {num_read} elements of {name!r} where {num_needed} are needed"
            )

    def _read_overlap(
        self, name: str, shard: Shard, piece: Piece, shape: Sequence[int], dtype: torch.dtype | None
    ) -> int:
        """Copies the intersection of `piece` and `shard`; returns its number of elements."""
        here, there = list[slice](), list[slice]()
        for (begin, size), (other, other_size) in zip(_box(piece), _box(shard, shape), strict=True):
            first, end = max(begin, other), min(begin + size, other + other_size)
            if first >= end:
                return 0
            here.append(slice(first - begin, end - begin))
            there.append(slice(first - other, end - other))
        there[0] = slice(there[0].start + shard.at, there[0].stop + shard.at)
        target, part = piece.values, self._view(name, shard, shape, dtype)
        dim = target.dim()
        part = part[tuple(there[:dim])]
        target[tuple(here[:dim])].copy_(part)
        return part.numel()

    def _view(self, name: str, shard: Shard, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        """The tensor `name` of the shard's file, as a view of the mapped file. Checks its shape and dtype."""
        path = self.manifest.folder / shard.file
        try:
            with self._opening:
                if shard.file not in self._open:
                    if self.manifest.fetch is not None:
                        self.manifest.fetch(shard.file)
                    self._open[shard.file] = safe_open(str(path), framework="pt", device="cpu")
            part: Tensor = self._open[shard.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: holds no readable tensor {name!r}: {error}; use another checkpoint"
            ) from None
        rows = (shard.at + shard.num_rows,) if shape else ()
        wanted = (*rows, *(size for _, size in _box(shard, shape)[1:]))[: len(shape)]
        fits = len(part.shape) == len(wanted) and part.shape[1:] == wanted[1:] and part.shape[:1] >= rows
        is_right = part.is_floating_point() if dtype is None else part.dtype == dtype
        if not (is_right and fits):
            needed = "a float dtype" if dtype is None else _name_of(dtype)
            raise UserError(
                f"{path}: holds {name!r} as {_name_of(part.dtype)} {list(part.shape)}, where {needed} "
                f"{list(wanted)} is needed; use another checkpoint"
            )
        return part


def _check_all_listed(manifest: Manifest, listed: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError if the checkpoint has optimizer state that this optimizer does not list: it would be
    lost silently. Another optimizer wrote it.
    """
    for name, parts in manifest.shards.items():
        if parts[0].file.startswith(_OPTIMIZER_FILES) and name not in listed:
            raise UserError(
                f"{manifest.folder}: holds {name!r}, which {type(optimizer).__name__} does not keep; "
                "continue with the optimizer and the model that saved it, or start anew in another output_dir"
            )


def _read_later(files: StoredFiles, stored: Stored, casts: bool) -> Callable[[], None]:
    # Shapes of DTensors are computed here, in the main thread, which made the meshes.
    tensor = stored.tensor
    dtype = None if casts else tensor.dtype
    return partial(files.read, stored.name, stored.pieces(), tuple(tensor.shape), dtype)


@torch.no_grad()
def _fill(files: StoredFiles, weight: Stored, casts: bool) -> None:
    """Loads a weight that is not stored in place (linear/weights/int8_weight.py); needs all its values."""
    values = dequantized(weight.tensor)
    _read_later(files, replace(weight, tensor=values), casts)()
    beside = dict[str, Tensor]()
    for prefix, tensor in stored_beside(weight.tensor).items():
        name = f"{prefix}/{weight.name}"
        # Use stored scales only if their layout is equal: tensor parallelism may cut a row, and each part of
        # the row then has its own scale.
        stored = files.manifest.extents(name)
        if stored == _extents(tensor.shape)[: len(stored)]:
            beside[prefix] = tensor.clone()
            _read_later(files, replace(weight, name=name, tensor=beside[prefix]), casts=False)()
    fill_stored(weight.tensor, values, beside)


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the dimensions, at least two: rows and columns are 1 if `shape` has no such dimension."""
    return (*shape, *(2 - len(shape)) * (1,))


def _box(part: Piece | Shard, shape: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(first, number) of each dimension, at least two. shape: of the whole tensor, for the dimensions that
    are not cut in a shard.
    """
    if isinstance(part, Shard):
        box = part.box
        return [*box, *((0, size) for size in shape[len(box) :])]
    box = tuple(zip(part.start, part.values.shape, strict=True))
    return [*box, *(2 - len(box)) * ((0, 1),)]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
