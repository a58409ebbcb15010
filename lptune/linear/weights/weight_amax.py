"""Amaxes of a sharded weight: how ranks agree on them.

Row scales need no communication, because FSDP does not divide rows. A scale per tensor needs the largest amax
of all ranks. A scale per 128 x 128 block needs the amaxes of neighbouring ranks, because a shard can end
inside a block. So ranks must agree on amaxes before they quantize their rows for an 8-bit gather:

    no amax source       a collective at each gather of each weight; needs nothing else, often slow
    PrecomputedScales    one collective for all weights, at the first gather after a change (precomputed.py)
    DelayedScaling       none after the first step: all ranks know the amaxes of past steps (delayed.py)

PrecomputedScales and DelayedScaling are amax sources; the registry LIVE has that of each layer
(kernels/record.py). At every gather, the amax source is called with the layer number and the amaxes of this
rank's rows. Ranks exchange amaxes, not scales, because the quantizers compute both the scale and its inverse
from the amax, each rounded once.

Rounding to the compute dtype is monotonic, so the amax of rounded rows is exactly the rounded amax. Float32
rows need not be cast before they are measured.

A mean of |W| is no maximum, but ranks agree on the sums of its rows in the same way: a rank has 0 for the
rows of others, and no sum of |W| is below 0, so the maximum over ranks is the sum of the rank that has the
row. What is said of amaxes holds for these sums.

Shapes: N out_features of the whole weight, M of them on this rank, K in_features; B x C scale blocks, 1 x 1
for a weight with one scale, N x 1 for one with a mean.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lptune.kernels import LIVE, AmaxSource, Quantized, block_amaxes, quantize_by_amax, type_of
from lptune.linear.kind import Shard
from lptune.numerics import nan_as_inf, sums_of_rows


def weight_changed(number: int) -> None:
    """Tells the amax source of layer `number`, if it has one, that something other than an optimizer wrote to
    the weight. All ranks must call it, even if only one wrote.
    """
    source = _source(number)
    if source is not None:
        source.weight_changed()


def whole_amax(number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
    """The amaxes (B, C) of a whole weight, from the layer's amax source, or by a collective if it has none.

    mine_BC: the amaxes of this rank's rows. mesh: the axis over which the weight is sharded.
    """
    source = _source(number)
    return max_over_ranks(mine_BC, mesh) if source is None else source.whole_amax(number, mine_BC, mesh)


def _source(number: int) -> AmaxSource | None:
    state = LIVE.get(number)
    return None if state is None else state.amax_source


def max_over_ranks(amax: Tensor, mesh: DeviceMesh) -> Tensor:
    """The elementwise maximum over the ranks of `mesh` (one axis), with inf in place of NaN. A collective."""
    amax = nan_as_inf(amax)  # a new tensor: all_reduce must not write to the caller's
    if mesh.size() > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return amax


def first_row(full_rows: int, mesh: DeviceMesh) -> int:
    """The first row of this rank. FSDP gives ceil(full_rows / ranks) rows to each rank until none is left."""
    return min(mesh.get_local_rank() * -(-full_rows // mesh.size()), full_rows)


@torch.no_grad()
def shard_amaxes(shards: Sequence[Shard]) -> list[Tensor]:
    """The amaxes (B, C) of each whole weight, or its sums of rows (N, 1), measured on this rank's rows alone;
    0 without such rows. float32, of values rounded to the compute dtype.
    """
    amaxes = [torch.zeros(_grid(shard), dtype=torch.float32, device=shard.rows_MK.device) for shard in shards]
    whole = [
        i
        for i, shard in enumerate(shards)
        if shard.block is None and not shard.mean_scale and shard.rows_MK.numel()
    ]
    if whole:
        for i, norm in zip(whole, _amaxes([shards[i].rows_MK for i in whole]), strict=True):
            amaxes[i].copy_(norm.to(shards[i].compute_dtype).reshape(1, 1))
    for shard, amax_BC in zip(shards, amaxes, strict=True):
        if shard.mean_scale:
            rows_MK = shard.rows_MK.to(shard.compute_dtype)
            amax_BC[shard.first_row : shard.first_row + len(rows_MK)] = sums_of_rows(rows_MK)
        elif shard.block is not None and shard.rows_MK.numel():
            _measure_blocks(shard, shard.block, amax_BC)
    return amaxes


def quantize_by_agreement(shard: Shard, fmt: str, agree: Callable[[Tensor], Tensor]) -> Quantized:
    """Quantizes the rows of a shard, rounded to the compute dtype, with the scales of the whole weight.

    agree: maps the amaxes (B, C) of this shard to those of the whole weight, equal on all ranks.
    """
    (mine_BC,) = shard_amaxes([shard])
    return Quantized(
        *quantize_by_amax(
            shard.rows_MK,
            agree(mine_BC),
            fmt,
            block=shard.block,
            first_row=shard.first_row,
            rounded_to=shard.compute_dtype,
        )
    )


def _amaxes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The amax of each tensor, in its dtype. NaN stays NaN."""
    if type_of(tensors[0].device) == "cpu":  # where torch's norm takes 13 times as long
        extremes = [torch.aminmax(each) for each in tensors]
        return [torch.maximum(-least, largest) for least, largest in extremes]
    # The inf-norm is the amax. This measures all weights in a few launches.
    return torch._foreach_norm(list(tensors), torch.inf)


def _grid(shard: Shard) -> tuple[int, int]:
    if shard.mean_scale:
        return (shard.full_rows, 1)
    if shard.block is None:
        return (1, 1)
    return (-(-shard.full_rows // shard.block), -(-shard.rows_MK.shape[1] // shard.block))


def _measure_blocks(shard: Shard, block: int, amax_BC: Tensor) -> None:
    first_block = shard.first_row // block
    above = shard.first_row - first_block * block  # rows of the first block that other ranks have
    measured = block_amaxes(shard.rows_MK, block, above)
    amax_BC[first_block : first_block + len(measured)] = measured.to(shard.compute_dtype)
