"""Layers that torch's tensor parallelism has cut: `parallelize_module` with ColwiseParallel, RowwiseParallel.

The weight and the activations are DTensors. The 8-bit ops have no DTensor sharding rules. Instead, each rank
multiplies its local parts, with scales of these parts, and wraps the result in a DTensor:

    weight                input                 output        gradient of input  gradient of weight
    Shard(0), Colwise     Replicate             Shard(-1)     Partial            Shard(0)
    Shard(1), Rowwise     Shard(-1)             Partial       Shard(-1)          Shard(1)
    Replicate             Replicate             Replicate     Replicate          Replicate
    Replicate             Shard(batch, tokens)  as the input  as the input       Partial

An input with another placement is redistributed first. Partial products are dequantized before they are
summed over ranks, so the sum adds no rounding to 8 bits.

`on_this_rank` and `as_sharded` convert between a DTensor and its local part.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lptune.base.errors import UserError

ALIGNMENT = 16
"""8-bit tensor-core GEMMs need rows of a multiple of 16 bytes. The rule holds on every device, so that a
model gets the same plan everywhere.
"""


def on_this_rank(tensor: Tensor) -> Tensor:
    """The local part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_sharded(tensor: Tensor, local: Tensor) -> Tensor:
    """`local`, this rank's rows; as a DTensor with the placements of `tensor`, if `tensor` is a DTensor."""
    if not isinstance(tensor, DTensor):
        return local
    # Row scales have one column per rank that has a part of the row, because tensor parallelism cuts rows.
    parts = math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard(1)
    )
    columns = tensor.shape[1] if local.shape[1] == tensor.to_local().shape[1] else parts
    return placed_as(tensor, local, (tensor.shape[0], columns))


def placed_as(
    like: DTensor, local: Tensor, shape: Sequence[int], placements: Sequence[Placement] | None = None
) -> DTensor:
    """A DTensor of `shape` with the mesh of `like`, and its placements unless others are given. Its part on
    this rank is `local` itself.

    `DTensor.from_local` would move `local` to the devices of the mesh, and FSDP keeps offloaded weights in
    host memory under a mesh of GPUs: what is written to the result would be written to a copy.
    """
    meta = TensorMeta(torch.Size(shape), _strides(shape), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements or like.placements), meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def check_part(part_NK: Tensor, whole: Sequence[int], num_ranks: int, group: int) -> None:
    """Raises UserError if the layer cannot multiply by `part_NK`.

    part_NK: this rank's part of a converted layer's weight, cut by tensor parallelism over `num_ranks` ranks.
    whole: the shape (N, K) of the uncut weight. group: of the kind, its weight_group.
    """
    n, k = part_NK.shape
    needed = f"an 8-bit GEMM needs multiples of {ALIGNMENT}" * bool(n % ALIGNMENT or k % ALIGNMENT)
    if not needed and k % group:
        needed = f"a scale covers {group} columns, which no cut may divide"
    if needed:
        raise UserError(
            f"parallel.tensor: {num_ranks} ranks leave {n} x {k} of a layer of {whole[0]} x {whole[1]}, and "
            f"{needed}; use fewer ranks, or name the layer in precision.skip"
        )


def multiply_parts(
    x: Tensor, weight: DTensor, multiply: Callable[[Tensor, Tensor, int], Tensor], group: int
) -> DTensor:
    """`x @ weight.T` as a DTensor (..., N), differentiable, with the placements of the table above.

    x: DTensor (..., K) on the weight's mesh. multiply: (..., K), (N, K), p -> (..., N), called with this
    rank's parts; p numbers the part of the output, and ranks with the same part (and gradient) have the same
    p. group: as in `check_part`. Raises UserError if x is no DTensor or is on another mesh, and as
    `check_part` does.
    """
    mesh = weight.device_mesh
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        raise UserError(
            f"a low-precision layer whose weight is cut over {mesh.size()} ranks got an input that is no "
            "DTensor of that mesh; apply ColwiseParallel or RowwiseParallel by parallelize_module, which "
            "convert it (or call the module that fully_shard was applied to)"
        )
    last = x.dim() - 1
    axes = [_axis(x_at, w_at, last) for x_at, w_at in zip(x.placements, weight.placements, strict=True)]
    x_at, out_at, x_grad_at, w_grad_at = zip(*axes, strict=True)
    if x.placements != x_at:
        x = x.redistribute(placements=x_at)
    part_NK = weight.to_local(grad_placements=w_grad_at)
    check_part(part_NK, weight.shape, mesh.size(), group)
    part = 0
    for axis, here in enumerate(mesh.get_coordinate() or ()):
        if out_at[axis].is_shard():
            part = part * mesh.size(axis) + here
    out = multiply(x.to_local(grad_placements=x_grad_at), part_NK, part)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    # from_local would compute the shape as if all parts were equally large.
    return DTensor.from_local(out, mesh, out_at, run_check=False, shape=shape, stride=_strides(shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _axis(x_at: Placement, w_at: Placement, last: int) -> tuple[Placement, Placement, Placement, Placement]:
    """Placements on one mesh axis: of the input as it is needed, the output, and the gradients of x and W."""
    if type(w_at) is Shard and w_at.dim in (0, 1):
        if w_at.dim == 0:
            return Replicate(), Shard(last), Partial(), w_at
        return Shard(last), Partial(), Shard(last), w_at
    if not w_at.is_replicate():
        raise UserError(f"a low-precision layer cannot multiply by a weight that is placed as {w_at}")
    if type(x_at) is Shard and x_at.dim != last:
        return x_at, x_at, x_at, Partial()
    return Replicate(), Replicate(), Replicate(), Replicate()
