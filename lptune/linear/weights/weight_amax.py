"""The amax of a weight of which each rank has some rows.

A scale per row needs nobody: rows are sharded whole. A scale per tensor needs the largest of all ranks'
amaxes, and a scale per 128 x 128 block those of its neighbours, since shards end inside blocks. So before a
rank can quantize its rows for an 8-bit all-gather, ranks must agree, and this is how they can:

    nothing              at each gather of each weight, a collective of its own; always right, often slow
    PrecomputedScales    one collective after each optimizer step, for all weights (precomputed.py)
    DelayedScaling       none: the amaxes of past steps are known to all ranks already (delayed.py)

The last two are *sources* (kernels/live.py): a source knows layers by number and is asked at every gather,
with what this rank has just measured on its own rows. Amaxes and not scales are exchanged, as the quantizers
want the scale and its inverse from one amax, rounded once each.

Rounding to the compute dtype keeps the order of numbers. The amax of rounded rows is therefore the rounded
amax, bit for bit, and float32 rows need not be cast to be measured.

Shapes: N out_features of the whole weight, M this rank's rows of them, K in_features; B x C blocks, of which
a weight with one scale has 1 x 1.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lptune.kernels import LIVE, AmaxSource, quantize_by_amax
from lptune.linear.weights.row_tensor import Quantized
from lptune.numerics import nan_as_inf


def weight_changed(number: int) -> None:
    """The weight of layer `number` was written by something other than the optimizer, on all ranks."""
    source = _source(number)
    if source is not None:
        source.weight_changed()


def whole_amax(number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
    """The amax of a whole weight, from that of this rank's rows; asks the layer's source, or all ranks."""
    source = _source(number)
    return max_over_ranks(mine_BC, mesh) if source is None else source.whole_amax(number, mine_BC, mesh)


def _source(number: int) -> AmaxSource | None:
    state = LIVE.get(number)
    return None if state is None else state.amax_source


def max_over_ranks(amax: Tensor, mesh: DeviceMesh) -> Tensor:
    """The elementwise maximum over the ranks of `mesh` (one axis); inf where there is a NaN. A collective."""
    amax = nan_as_inf(amax)
    if mesh.size() > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return amax


class Shard(NamedTuple):
    """Rows [first_row, first_row + M) of a weight."""

    rows_MK: Tensor  # any float dtype
    first_row: int
    full_rows: int
    block: int | None  # side of the blocks that have an amax each; None: one for the whole
    compute_dtype: torch.dtype


def first_row(full_rows: int, mesh: DeviceMesh) -> int:
    """Where this rank's rows begin, as FSDP deals them out: to each rank as many as to the first, while they
    last.
    """
    return min(mesh.get_local_rank() * -(-full_rows // mesh.size()), full_rows)


@torch.no_grad()
def shard_amaxes(shards: Sequence[Shard]) -> list[Tensor]:
    """The amaxes (B, C) of each whole weight as far as its shard here tells, 0 for blocks that are elsewhere;
    float32, of values rounded to the compute dtype.
    """
    amaxes = [torch.zeros(_grid(shard), dtype=torch.float32, device=shard.rows_MK.device) for shard in shards]
    whole = [i for i, shard in enumerate(shards) if shard.block is None and shard.rows_MK.numel()]
    if whole:
        # All weights in a few launches. The norm of order inf is the largest magnitude, and keeps NaN.
        norms = torch._foreach_norm([shards[i].rows_MK for i in whole], torch.inf)
        for i, norm in zip(whole, norms, strict=True):
            amaxes[i].copy_(norm.to(shards[i].compute_dtype).reshape(1, 1))
    for shard, amax_BC in zip(shards, amaxes, strict=True):
        if shard.block is not None and shard.rows_MK.numel():
            _measure_blocks(shard, shard.block, amax_BC)
    return amaxes


def quantize_by_agreement(shard: Shard, fmt: str, agree: Callable[[Tensor], Tensor]) -> Quantized:
    """The 8-bit rows of a shard whose rows are in compute dtype, by the scales of the whole weight.

    agree: the amaxes (B, C) of this shard -> those of the whole weight, on all ranks alike.
    """
    (mine_BC,) = shard_amaxes([shard])
    return Quantized(
        *quantize_by_amax(shard.rows_MK, agree(mine_BC), fmt, block=shard.block, first_row=shard.first_row)
    )


def _grid(shard: Shard) -> tuple[int, int]:
    if shard.block is None:
        return (1, 1)
    return (-(-shard.full_rows // shard.block), -(-shard.rows_MK.shape[1] // shard.block))


def _measure_blocks(shard: Shard, block: int, amax_BC: Tensor) -> None:
    (m, k), first = shard.rows_MK.shape, shard.first_row // block
    above = shard.first_row - first * block
    # Zeros fill up the first and the last block; they do not change an amax.
    filled = F.pad(shard.rows_MK.abs(), (0, -k % block, above, -(above + m) % block))
    tiles = filled.view(filled.shape[0] // block, block, -1, block)
    amax_BC[first : first + tiles.shape[0]] = tiles.amax((1, 3)).to(shard.compute_dtype)
