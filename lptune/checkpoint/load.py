"""Loading a checkpoint: each rank reads its own rectangles of every tensor, whatever ranks wrote them.

A file is mapped into memory, once, and a tensor of it is a view of the mapping, so what is needed of a tensor
is copied a single time: from the mapping (disk, or the page cache that verification has just filled) to where
it belongs, cast on the way. The cost is that of touching new memory, page by page; several threads share it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lptune.checkpoint.files import num_threads
from lptune.checkpoint.manifest import Manifest, Shard
from lptune.checkpoint.state import read_state
from lptune.checkpoint.stored import (
    MOMENTS,
    SCALE,
    as_shard,
    fused_rows_of,
    model_tensors,
    optimizer_tensors,
)
from lptune.config import UserError
from lptune.distributed import Piece, fused_rows, local_pieces, on_this_rank
from lptune.linear import dequantized, int8_rows, plain_rows, row_scales, weights_changed


def load_state(
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicated: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fills parameters and optimizer state from a verified checkpoint, each rank reading its own part.

    replicated: what `CheckpointWriter.save` was given, filled in place as far as the checkpoint has it; a run
    that used another precision has other tensors there, or none.
    """
    # AdamW counts updates, and a step that was not finite made none.
    num_updates = manifest.step - read_state(manifest).skipped["num_skipped"]
    for name, parameter in model.named_parameters():
        # A parameter that was never updated (a frozen one) has no state.
        if f"{MOMENTS[0]}/{name}" in manifest.shards:
            step = torch.tensor(float(num_updates), dtype=torch.float32, device=parameter.device)
            moments = {moment: _new_moment(parameter) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}
    files = StoredFiles(manifest)
    fused = fused_rows(model)
    reads: list[Callable[[], None]] = []
    for name, tensor in (model_tensors(model) | optimizer_tensors(model, optimizer)).items():
        rows = fused_rows_of(fused, name)
        if int8_rows(tensor) is not None:
            _read_int8(files, name, tensor, rows)
        else:
            reads.append(_read_later(files, name, tensor, rows))
    reads += [
        _read_later(files, name, tensor) for name, tensor in replicated.items() if name in manifest.shards
    ]
    in_threads(reads, num_reading_threads())
    weights_changed(model)


class StoredFiles:
    """The tensors of a checkpoint, read from files that stay mapped as long as this object lives.

    Safe to use from several threads.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: dict[str, Any] = {}
        self._opening = threading.Lock()

    @torch.no_grad()  # which every thread has to say for itself
    def read(
        self, name: str, pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        """Fills `pieces` of the tensor `name`, casting to their dtype.

        shape, dtype: what the whole tensor must be in the checkpoint. Raises UserError where it is not, and
        unless exactly the elements of `pieces` were read.
        """
        shards = self.manifest.shards.get(name, [])
        size = (*shape, 1, 1)[:2]
        stored = (
            max((shard.start + shard.rows for shard in shards), default=0),
            max((shard.column + shard.columns for shard in shards), default=0),
        )
        if stored != size:
            raise UserError(
                f"{self.manifest.folder}: holds {stored[0]} x {stored[1]} elements of {name!r} where "
                f"{size[0]} x {size[1]} are needed"
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
        self, name: str, shard: Shard, piece: Piece, shape: Sequence[int], dtype: torch.dtype
    ) -> int:
        """Copies what `piece` has in common with `shard`; returns how many elements."""
        mine = as_shard("", piece)
        row, end_row = max(mine.start, shard.start), min(mine.start + mine.rows, shard.start + shard.rows)
        column = max(mine.column, shard.column)
        end_column = min(mine.column + mine.columns, shard.column + shard.columns)
        if row >= end_row or column >= end_column:
            return 0
        target, part = piece.values, self._view(name, shard, shape, dtype)
        dim = target.dim()
        if dim > 0:
            first = row - shard.start + shard.at
            region = (
                slice(first, first + end_row - row),
                slice(column - shard.column, end_column - shard.column),
            )
            part = part[region[:dim]]
            into = (
                slice(row - mine.start, end_row - mine.start),
                slice(column - mine.column, end_column - mine.column),
            )
            target = target[into[:dim]]
        target.copy_(part)
        return part.numel()

    def _view(self, name: str, shard: Shard, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What the shard's file holds under `name`; a view of the mapped file."""
        path = self.manifest.folder / shard.file
        try:
            with self._opening:
                if shard.file not in self._open:
                    self._open[shard.file] = safe_open(str(path), framework="pt", device="cpu")
            part: Tensor = self._open[shard.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: holds no readable tensor {name!r}: {error}; use another checkpoint"
            ) from None
        rows = (shard.at + shard.rows,) if shape else ()
        wanted = (*rows, shard.columns, *shape[2:])[: len(shape)]
        fits = len(part.shape) == len(wanted) and part.shape[1:] == wanted[1:] and part.shape[:1] >= rows
        if part.dtype != dtype or not fits:
            raise UserError(
                f"{path}: holds {name!r} as {_describe(part.dtype, part.shape)}, its manifest needs "
                f"{_describe(dtype, wanted)}; use another checkpoint"
            )
        return part


def in_threads(calls: Iterable[Callable[[], None]], at_once: int) -> None:
    """Makes the calls in `at_once` threads. The first error is raised, after what was begun has ended; no
    further call is begun.
    """
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(lambda call: call(), calls):
            pass


def num_reading_threads() -> int:
    """Two at least; more where torch's own threads leave cores of this rank's share unused."""
    return max(2, min(8, num_threads() // torch.get_num_threads()))


def _new_moment(parameter: Tensor) -> Tensor:
    # Every element will be read, or loading fails: filling it first would be a second pass over new memory.
    if int8_rows(parameter) is not None:
        return torch.zeros_like(parameter)
    return torch.empty_like(plain_rows(parameter.detach()))


def _read_later(
    files: StoredFiles, name: str, tensor: Tensor, fused: Sequence[int] = ()
) -> Callable[[], None]:
    # Meshes are asked here, in the thread that owns them.
    return partial(files.read, name, local_pieces(tensor, fused), tuple(tensor.shape), tensor.dtype)


@torch.no_grad()
def _read_int8(files: StoredFiles, name: str, tensor: Tensor, fused: Sequence[int]) -> None:
    # All of a row first: its scale comes from its largest value.
    values, scales = dequantized(tensor), None
    _read_later(files, name, values, fused)()
    if _has_scales(files.manifest, name, tensor):
        scales = row_scales(tensor).clone()
        _read_later(files, f"{SCALE}/{name}", scales, fused)()
    weight = int8_rows(tensor)
    assert weight is not None
    weight.fill_from(on_this_rank(values), None if scales is None else on_this_rank(scales))


def _has_scales(manifest: Manifest, name: str, tensor: Tensor) -> bool:
    """Whether the checkpoint has the scales of this very layout: a row that tensor parallelism cuts has one
    in each part.
    """
    stored = manifest.shards.get(f"{SCALE}/{name}", [])
    return max((each.column + each.columns for each in stored), default=0) == row_scales(tensor).shape[1]


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
