"""Loading a checkpoint: each rank reads its own rectangles of every tensor, whatever ranks wrote them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lptune.checkpoint.manifest import Manifest, Shard
from lptune.checkpoint.stored import (
    MOMENTS,
    SCALE,
    as_shard,
    fused_rows_of,
    model_tensors,
    on_this_rank,
    optimizer_tensors,
)
from lptune.config import UserError
from lptune.distributed import Piece, fused_rows, local_pieces
from lptune.linear import dequantized, int8_rows, row_scales, weights_changed


def load_state(
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicated: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fills parameters and optimizer state from a verified checkpoint, each rank reading its own part.

    replicated: what save_state was given, filled in place as far as the checkpoint has it; a run that used
    another precision has other tensors there, or none.
    """
    for name, parameter in model.named_parameters():
        # A parameter that was never updated (a frozen one) has no state.
        if f"{MOMENTS[0]}/{name}" in manifest.shards:
            step = torch.tensor(float(manifest.step), dtype=torch.float32, device=parameter.device)
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}
    fused = fused_rows(model)
    for name, tensor in (model_tensors(model) | optimizer_tensors(model, optimizer)).items():
        rows = fused_rows_of(fused, name)
        if int8_rows(tensor) is not None:
            _read_int8(manifest, name, tensor, rows)
        else:
            _read(manifest, name, tensor, rows)
    weights_changed(model)
    for name, tensor in replicated.items():
        if name in manifest.shards:
            _read(manifest, name, tensor)


def _has_scales(manifest: Manifest, name: str, tensor: Tensor) -> bool:
    """Whether the checkpoint has the scales of this very layout: a row that tensor parallelism cuts has one
    in each part.
    """
    stored = manifest.shards.get(f"{SCALE}/{name}", [])
    return max((each.column + each.columns for each in stored), default=0) == row_scales(tensor).shape[1]


@torch.no_grad()
def _read_int8(manifest: Manifest, name: str, tensor: Tensor, fused: Sequence[int]) -> None:
    # All of a row first: its scale comes from its largest value.
    values, scales = dequantized(tensor), None
    _read(manifest, name, values, fused)
    if _has_scales(manifest, name, tensor):
        scales = row_scales(tensor).clone()
        _read(manifest, f"{SCALE}/{name}", scales, fused)
    weight = int8_rows(tensor)
    assert weight is not None
    weight.fill_from(on_this_rank(values), None if scales is None else on_this_rank(scales))


@torch.no_grad()
def _read(manifest: Manifest, name: str, tensor: Tensor, fused: Sequence[int] = ()) -> None:
    shards = manifest.shards.get(name, [])
    size = (*tensor.shape, 1, 1)[:2]
    stored = tuple(
        max((first + number for first, number in ends), default=0)
        for ends in (
            [(shard.start, shard.rows) for shard in shards],
            [(shard.column, shard.columns) for shard in shards],
        )
    )
    if stored != size:
        raise UserError(
            f"{manifest.folder}: holds {stored[0]} x {stored[1]} elements of {name!r} where "
            f"{size[0]} x {size[1]} are needed"
        )
    num_needed = num_read = 0
    for piece in local_pieces(tensor, fused):
        num_needed += piece.values.numel()
        num_read += sum(_read_overlap(manifest, name, shard, piece) for shard in shards)
    if num_read != num_needed:
        raise UserError(
            f"{manifest.folder}: holds {num_read} elements of {name!r} where {num_needed} are needed"
        )


def _read_overlap(manifest: Manifest, name: str, shard: Shard, piece: Piece) -> int:
    """Copies what `piece` has in common with `shard`; returns how many elements."""
    mine = as_shard("", piece)
    row, end_row = max(mine.start, shard.start), min(mine.start + mine.rows, shard.start + shard.rows)
    column = max(mine.column, shard.column)
    end_column = min(mine.column + mine.columns, shard.column + shard.columns)
    if row >= end_row or column >= end_column:
        return 0
    target, dim = piece.values, piece.values.dim()
    with safe_open(str(manifest.folder / shard.file), framework="pt", device="cpu") as tensors:
        if dim == 0:
            part = tensors.get_tensor(name)
        else:
            first = row - shard.start + shard.at
            region = (
                slice(first, first + end_row - row),
                slice(column - shard.column, end_column - shard.column),
            )
            part = tensors.get_slice(name)[region[:dim]]
            into = (
                slice(row - mine.start, end_row - mine.start),
                slice(column - mine.column, end_column - mine.column),
            )
            target = target[into[:dim]]
    target.copy_(part)
    return int(part.numel())
