"""What of a sharded tensor is on this rank, and where it lies in the whole.

FSDP cuts rows, tensor parallelism rows or columns, so a rank holds a rectangle of a matrix. One kind of
parameter is less simple: a fused projection stacks q, k and v (or gate and up), and a rank needs its heads of
all three, so its rows come from three places. Tensor parallelism then keeps the rows in another order than
the checkpoint,

    checkpoint  | q0 q1 | k0 k1 | v0 v1 |      two ranks: | q0 k0 v0 | q1 k1 v1 |

and `local_pieces` says which rectangle of the checkpoint's tensor each run of local rows is. Whoever reads or
writes files goes by pieces and needs to know no more of meshes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lptune.linear import plain_rows


class Piece(NamedTuple):
    """A rectangle of a tensor; a vector is a matrix of one column here, and has column 0."""

    values: Tensor
    """A view of this rank's storage, of as many dimensions as the tensor."""
    row: int
    column: int
    """Where it begins in the whole tensor."""
    at: int
    """Its first row within what this rank holds."""


def local_pieces(tensor: Tensor, fused_rows: Sequence[int] = ()) -> list[Piece]:
    """This rank's part of `tensor` (all of it when it is not sharded), empty pieces left out.

    fused_rows: numbers of rows of the matrices that a fused parameter stacks, cut one by one over the mesh
    axis `tensor`.
    """
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return [Piece(tensor.detach(), 0, 0, 0)] if tensor.numel() else []
    local = tensor.to_local().detach()
    (row, num_rows), (column, _) = _rectangle(tensor)
    assert local.numel() == 0 or local.shape[0] == num_rows, (local.shape, num_rows)
    pieces, at = [], 0
    for start, length in row_runs(row, num_rows, fused_rows, _tensor_size(tensor)):
        piece = Piece(local[at : at + length], start, column, at)
        if piece.values.numel():
            pieces.append(piece)
        at += length
    return pieces


def on_this_rank(tensor: Tensor) -> Tensor:
    """The local part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor whose rows alone are cut, and the number of its first row."""
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    (row, num_rows), _ = _rectangle(tensor)
    return tensor.to_local().detach(), row if num_rows else 0


def first_column(tensor: Tensor) -> int:
    """Of this rank's part."""
    return _rectangle(tensor)[1][0] if isinstance(tensor, DTensor) else 0


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of `tensor`: the one that writes it."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == 0 for axis in copies)


def full_tensor(tensor: Tensor, fused_rows: Sequence[int] = ()) -> Tensor:
    """The whole of it, its rows in the checkpoint's order. A collective, if it is sharded."""
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    full: Tensor = tensor.full_tensor()
    num_ranks = _tensor_size(tensor)
    if not fused_rows or num_ranks == 1:
        return full
    runs = row_runs(0, full.shape[0], fused_rows, num_ranks)
    whole, at = torch.empty_like(full), 0
    for start, length in runs:
        whole[start : start + length] = full[at : at + length]
        at += length
    return whole


def _tensor_size(tensor: DTensor) -> int:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index("tensor")) if "tensor" in names else 1


def _rectangle(tensor: DTensor) -> list[tuple[int, int]]:
    """(first, number) of this rank's rows and columns, rows as they lie over the mesh."""
    mesh: DeviceMesh = tensor.device_mesh
    bounds = [(0, size) for size in (*tensor.shape, 1, 1)[: max(2, tensor.dim())]]
    # The innermost axis first: FSDP cuts what tensor parallelism has left.
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]  # Shard, or FSDP's strided one
        first, number = bounds[dim]
        chunk = -(-number // mesh.size(axis))
        start = min(chunk * mesh.get_local_rank(axis), number)
        bounds[dim] = (first + start, min(chunk, number - start))
    return bounds


def row_runs(row: int, num_rows: int, fused_rows: Sequence[int], num_ranks: int) -> list[tuple[int, int]]:
    """(first, number) in the checkpoint of the rows [row, row + num_rows) as they lie over `num_ranks` ranks.

    fused_rows: see local_pieces.
    """
    if not fused_rows or num_ranks == 1:
        return [(row, num_rows)]
    starts = [0, *itertools.accumulate(fused_rows)]
    runs, begin = [], 0
    for rank in range(num_ranks):
        for start, size in zip(starts, fused_rows, strict=False):
            share = size // num_ranks
            first, last = max(begin, row), min(begin + share, row + num_rows)
            if first < last:
                runs.append((start + rank * share + first - begin, last - first))
            begin += share
    return runs
