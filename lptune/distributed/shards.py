"""Which part of a sharded tensor this rank holds, and where this part lies in the whole tensor.

FSDP shards rows; tensor parallelism cuts rows or columns. So a rank holds a rectangle of a matrix, and a box
of a tensor with more dimensions (such as a stack of experts). A fused projection is less simple: it stacks q,
k and v (or gate and up), and a rank needs its heads of all three, so its rows come from three places. Tensor
parallelism then keeps the rows in another order than the checkpoint, the order of the mesh,

    checkpoint  | q0 q1 | k0 k1 | v0 v1 |      two ranks: | q0 k0 v0 | q1 k1 v1 |

and `local_pieces` says which box of the checkpoint's tensor each run of local rows is. Code that reads or
writes files works on these pieces alone and does not depend on the mesh.

A MasterWeight (the parameter of an 8-bit gather) counts as its float rows. Functions that return values take
these rows by `plain_rows`; functions that read only sizes and placements need not.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from lptune.linear import on_this_rank, placed_as, plain_rows


class Piece(NamedTuple):
    """A box of a tensor: in each dimension, a range of indices. `values` has the box's shape."""

    values: Tensor
    """A view of this rank's storage, of as many dimensions as the tensor."""
    start: tuple[int, ...]
    """Where the box begins in the whole tensor, a number for each dimension."""
    at: int = 0
    """The first row of `values`, counted in what this rank holds."""

    @property
    def region(self) -> tuple[slice, ...]:
        """The index that takes the box from the whole tensor."""
        sizes = self.values.shape
        return tuple(slice(first, first + size) for first, size in zip(self.start, sizes, strict=True))


def whole_piece(tensor: Tensor) -> Piece:
    """An unsharded tensor as one piece."""
    return Piece(tensor, (0,) * tensor.dim())


def local_pieces(tensor: Tensor, fused_rows: Sequence[int] = ()) -> list[Piece]:
    """This rank's part of `tensor` (all of it when it is not sharded), empty pieces left out.

    fused_rows: numbers of rows of the matrices that a fused parameter stacks, each of which is cut by itself
    over the mesh axis `tensor`. Ignored where that axis does not cut the tensor's rows.
    """
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return [whole_piece(tensor.detach())] if tensor.numel() else []
    local = tensor.to_local().detach()
    box = _box(tensor)
    if local.numel() == 0:
        return []
    assert local.shape == tuple(size for _, size in box), (local.shape, box)
    if not box:
        return [whole_piece(local)]
    (row, num_rows), *others = box
    rest = tuple(first for first, _ in others)
    pieces, at = [], 0
    for start, length in row_runs(row, num_rows, fused_rows, _num_row_parts(tensor, fused_rows)):
        pieces.append(Piece(local[at : at + length], (start, *rest), at))
        at += length
    return pieces


def zeros_by_rows(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of shape (rows of `like`, *shape), sharded by rows as `like` is. For optimizer state that has one
    number or several for each row of a parameter. Raises ValueError if `like` is cut by other dims than rows.
    """
    like = like.detach()
    rows = (like.shape[0], *shape)
    if not isinstance(like, DTensor):
        return torch.zeros(rows, dtype=dtype, device=like.device)
    # Not `is_shard(0)`, which is False for the strided placement of FSDP on rows that tensor parallelism cut.
    if any(not (placement.is_replicate() or _cuts(placement, 0)) for placement in like.placements):
        raise ValueError(f"placed as {like.placements}, of which not each is by rows")
    local = torch.zeros((like.to_local().shape[0], *shape), dtype=dtype, device=like.device)
    return placed_as(like, local, rows)


def blocks_are_whole(tensor: Tensor, block: int) -> bool:
    """Whether each block of `block` elements of a row, the last of which may be shorter, lies on one rank."""
    if not isinstance(tensor, DTensor):
        return True
    return all(
        not _cuts(placement, 1) or tensor.shape[1] % (block * tensor.device_mesh.size(axis)) == 0
        for axis, placement in enumerate(tensor.placements)
    )


def zeros_by_blocks(like: Tensor, block: int) -> Tensor:
    """Float32 zeros, one for each block of `block` elements of a row of the matrix `like`, on the ranks that
    have the block. Where a block is cut between ranks, each has the numbers of whole rows.
    """
    num_rows, k = like.shape
    shape = (num_rows, -(-k // block))
    if not isinstance(like, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=like.device)
    placements = [
        Replicate() if _cuts(placement, 1) and not blocks_are_whole(like, block) else placement
        for placement in like.placements
    ]
    parts = math.prod(like.device_mesh.size(axis) for axis, each in enumerate(placements) if _cuts(each, 1))
    local = torch.zeros(
        on_this_rank(like).shape[0], shape[1] // parts, dtype=torch.float32, device=like.device
    )
    return placed_as(like, local, shape, placements)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor, and the index of its first row in the order of the mesh (0 if empty)."""
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    row, num_rows = _box(tensor)[0]
    return tensor.to_local().detach(), row if num_rows else 0


def first_column(tensor: Tensor) -> int:
    """Index of the first column of this rank's part of a matrix; 0 of a vector."""
    return _box(tensor)[1][0] if isinstance(tensor, DTensor) and tensor.dim() > 1 else 0


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this rank is the first that holds its part of `tensor`: the first on each mesh axis over which
    `tensor` is replicated. The first holder writes the part.
    """
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == 0 for axis in copies)


def full_tensor(tensor: Tensor, fused_rows: Sequence[int] = ()) -> Tensor:
    """The whole tensor, with rows in the order of the checkpoint. A collective if `tensor` is sharded."""
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    full: Tensor = tensor.full_tensor()
    num_parts = _num_row_parts(tensor, fused_rows)
    if not fused_rows or num_parts == 1:
        return full
    # `full` has its rows in the order of the mesh.
    runs = row_runs(0, full.shape[0], fused_rows, num_parts)
    whole, at = torch.empty_like(full), 0
    for start, length in runs:
        whole[start : start + length] = full[at : at + length]
        at += length
    return whole


def _num_row_parts(tensor: DTensor, fused_rows: Sequence[int]) -> int:
    """Into how many parts the mesh axis `tensor` cuts each of the fused matrices; 1 if it does not.

    Raises ValueError if rows are cut on a mesh without that axis: nothing else says which ranks have heads of
    their own, and a guess would return rows in the wrong order.
    """
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    if not fused_rows or not any(_cuts(placement, 0) for placement in tensor.placements):
        return 1
    if "tensor" not in names:
        raise ValueError(
            f"fused rows {tuple(fused_rows)} are cut over a mesh with the axes {names or 'without names'}; "
            "call the axis of tensor parallelism `tensor` (init_device_mesh(…, mesh_dim_names=…))"
        )
    if not _cuts(tensor.placements[names.index("tensor")], 0):
        return 1
    # `tensor` may be state of the fused parameter, with the same order of rows, if it has as many rows.
    if sum(fused_rows) != tensor.shape[0]:
        raise ValueError(
            f"a tensor of {tensor.shape[0]} rows, cut over the axis `tensor`, belongs to a parameter whose "
            f"{sum(fused_rows)} rows that axis reorders; give it a row for each row of the parameter, or "
            "keep it whole"
        )
    return mesh.size(names.index("tensor"))


def _cuts(placement: Placement, dim: int) -> bool:
    return getattr(placement, "dim", None) == dim


def _box(tensor: DTensor) -> list[tuple[int, int]]:
    """(first, number) of this rank's part in each dimension; rows are counted in the order of the mesh."""
    mesh: DeviceMesh = tensor.device_mesh
    bounds = [(0, size) for size in tensor.shape]
    # From the last axis, `tensor`, to the first: FSDP shards what tensor parallelism has left. Each time, all
    # parts but the last ones have equal size, as torch.chunk makes them.
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim: int | None = getattr(placement, "dim", None)  # of Shard, or FSDP's strided one
        if dim is None:
            raise ValueError(f"a tensor placed as {placement!r}: no rank holds a part of its values")
        first, number = bounds[dim]
        chunk = -(-number // mesh.size(axis))
        start = min(chunk * mesh.get_local_rank(axis), number)
        bounds[dim] = (first + start, min(chunk, number - start))
    return bounds


def row_runs(row: int, num_rows: int, fused_rows: Sequence[int], num_ranks: int) -> list[tuple[int, int]]:
    """Where rows of a tensor that was cut lie in the checkpoint: runs (first, number), one after the other.

    row, num_rows: the rows [row, row + num_rows), in the order of the mesh. fused_rows: see local_pieces.
    num_ranks: of the axis `tensor`; divides each of fused_rows.
    """
    if not fused_rows or num_ranks == 1:
        return [(row, num_rows)]
    starts = [0, *itertools.accumulate(fused_rows)]
    runs, begin = [], 0
    for rank in range(num_ranks):
        for start, size in zip(starts, fused_rows, strict=False):  # the last of `starts` is the end
            share = size // num_ranks
            first, last = max(begin, row), min(begin + share, row + num_rows)
            if first < last:
                runs.append((start + rank * share + first - begin, last - first))
            begin += share
    return runs
