"""Weights that FSDP2 gathers in 8 bits: `precision.all_gather: low`.

A layer that multiplies by one set of 8-bit values of its weight, and by nothing else, needs no more than
these: each rank quantizes its own rows and sends them, half the bytes of bfloat16.

    MasterWeight     the sharded float32 parameter; an ordinary tensor to everybody but FSDP
    GatheredWeight   the whole weight, q and scale, as the layer's forward and backward see it

    scale per row         made by the rank that has the row, and sent with it
    per tensor or block   by the amax over all ranks (weight_amax.py), known before and not sent

Rows are cast to the compute dtype before they are quantized, as on the path where FSDP gathers the compute
dtype and the layer quantizes: the two give the same bits, in losses and in weights after any number of steps.

The 8-bit rows are made anew for every gather, from the weight as it is then.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lptune.config import UserError
from lptune.kernels import note_gather
from lptune.linear.dtensors import as_sharded, on_this_rank
from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.weights.row_tensor import CUTTING, GatheredByRows, Quantized, RowTensor
from lptune.linear.weights.weight_amax import Shard, first_row, whole_amax
from lptune.numerics import FORMATS, QuantizedBlocks, QuantizedTensor, dequantize, dequantize_blocks


class GatheredWeight(RowTensor):
    """q and scale of a whole weight; q is a view of the buffer that was gathered. Looks like the compute
    dtype.
    """

    PARTS = ("q_NK", "scale")
    CONTEXT = ("block",)

    q_NK: Tensor
    """int8 or float8."""
    scale: Tensor
    """float32: (N, 1), (1, 1), or (ceil(N / block), ceil(K / block))."""
    block: int | None
    """Side of the blocks that have a scale each; None: rows have one, or the tensor."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """`q * scale` in float32, rounded once to `dtype` (its own, if None)."""
        dtype = dtype or self.dtype
        if self.block is None:
            return dequantize(QuantizedTensor(self.q_NK, self.scale), dtype)
        return dequantize_blocks(QuantizedBlocks(self.q_NK, self.scale), (self.block, self.block), dtype)

    @classmethod
    def operation(cls, func: Any) -> Callable[..., Any] | None:
        """It is whole: nothing cuts or pads it, and what does so to a copy sees plain values."""
        return super().operation(func) if func not in CUTTING else None

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whoever reads it sees the dequantized values; nobody writes to it."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would change a gathered weight; change the sharded parameter")

        def dequantized(weight: GatheredWeight) -> Tensor:
            return weight.dequantize().view(weight.shape)

        plain_args, plain_kwargs = tree_map_only(GatheredWeight, dequantized, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


class MasterWeight(GatheredByRows):
    """Float rows of which 8-bit rows are made for each gather. Every operator acts on the rows themselves."""

    PARTS = ("rows_NK",)
    CONTEXT = ("number", "spec", "compute_dtype")

    rows_NK: Tensor
    """The weight, or this rank's part of it; live storage."""
    number: int
    """Of its layer, for the count of gathers and the amaxes."""
    spec: LinearSpec
    compute_dtype: torch.dtype

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer, an initializer or a loader reads and writes the rows in place."""

        def live(weight: MasterWeight) -> Tensor:
            return weight.rows_NK.view(weight.shape)

        plain_args, plain_kwargs = tree_map_only(MasterWeight, live, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "MasterWeight":
        """The rows have the dtype that is shown."""
        return self.rebuilt([function(self.rows_NK).to(dtype or self.dtype)], dtype)

    def of_plain(self, value: Tensor) -> "MasterWeight":
        """`value` itself is the rows."""
        return self.rebuilt([value.detach()], value.dtype)

    def rows_to_send(self, mesh: DeviceMesh) -> Quantized:
        """Made now, from the rows as they are, rounded to the compute dtype first."""
        shard = self.shard(self.rows_NK.to(self.compute_dtype), mesh)

        def agree(mine_BC: Tensor) -> Tensor:
            return whole_amax(self.number, mine_BC, mesh)

        return kind_of(self.spec).quantize_shard(self.spec, shard, agree)

    def shard(self, rows_NK: Tensor, mesh: DeviceMesh) -> Shard:
        """Where `rows_NK`, its rows in whatever dtype, are in the weight. mesh: the axis that cuts it."""
        first = first_row(self.full_rows, mesh)
        return Shard(rows_NK, first, self.full_rows, kind_of(self.spec).weight_block, self.compute_dtype)

    def whole(self, quantized: Quantized, dtype: torch.dtype) -> RowTensor:
        """A GatheredWeight; counted. Raises UserError where FSDP's dtype is not that of the rows."""
        if dtype != self.compute_dtype:
            raise UserError(
                f"gather_in_8_bits() was called with compute_dtype={self.compute_dtype}, and fully_shard's "
                f"mixed-precision policy has param_dtype {dtype}; they must be the same"
            )
        note_gather(self.number, quantized.q_NK.untyped_storage().nbytes())
        block = kind_of(self.spec).weight_block
        return GatheredWeight(*quantized, dtype=dtype, full_rows=self.full_rows, block=block)

    @property
    def row_dtype(self) -> torch.dtype:
        """The 8-bit dtype of the format of W."""
        return FORMATS[self.spec.fmt].dtype

    @property
    def header_bytes(self) -> int:
        """Bytes that the kind puts before each row: room for its scale, or none."""
        return kind_of(self.spec).header_bytes


def make_master(linear: nn.Linear, number: int, spec: LinearSpec, compute_dtype: torch.dtype) -> None:
    """Makes the weight of `linear` a MasterWeight: the same Parameter, before `fully_shard`.

    number: what the kernels know the layer by.
    """
    old = linear.weight
    context = {"number": number, "spec": spec, "compute_dtype": compute_dtype}
    # What tensor parallelism left to this rank is the whole weight of its FSDP axis.
    whole = old.detach()
    rows_NK = on_this_rank(whole)
    local = MasterWeight(rows_NK, dtype=old.dtype, full_rows=None, size=None, **context)
    master = as_sharded(whole, local)
    torch.utils.swap_tensors(old, nn.Parameter(master, requires_grad=old.requires_grad))


def renumber(weight: Tensor, number: int) -> None:
    """A MasterWeight, or a DTensor of one, becomes the weight of layer `number`."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight  # `to_local` returns a view of it
    assert isinstance(local, MasterWeight)
    local.number = number


def is_master(tensor: Tensor) -> bool:
    """Whether `tensor` is a MasterWeight, or a DTensor of one."""
    return isinstance(on_this_rank(tensor), MasterWeight)


def gather_bytes(shape: Sequence[int], num_ranks: int, spec: LinearSpec) -> int:
    """What an 8-bit gather of a weight of `shape`, sharded over `num_ranks`, brings to each of them: K bytes
    a row, and 16 more where a row has its scale; padding included.
    """
    rows = -(-shape[0] // num_ranks) * num_ranks
    return rows * (kind_of(spec).header_bytes + shape[1])


def planned_bytes(weight: DTensor, spec: LinearSpec) -> int:
    """`gather_bytes` of a weight that FSDP holds; under tensor parallelism of this rank's part of it."""
    local = weight.to_local()
    rows = local.full_rows if isinstance(local, RowTensor) else weight.shape[0]
    return gather_bytes((rows, local.shape[1]), num_gathering_ranks(weight), spec)


def num_gathering_ranks(weight: DTensor) -> int:
    """Ranks among which FSDP gathers `weight`."""
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    # Replicas (HSDP) gather each for themselves. A mesh of somebody's own has no tensor axis of ours.
    cut = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    axes = [names.index("fsdp")] if "fsdp" in names else cut
    return math.prod(mesh.size(axis) for axis in axes)


def plain_rows(tensor: Tensor) -> Tensor:
    """`tensor`, or the live rows where it is a MasterWeight; in a DTensor as it was, if it was in one."""
    local = on_this_rank(tensor)
    if not isinstance(local, MasterWeight):
        return tensor
    return as_sharded(tensor, local.rows_NK)


def master_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, plain or a DTensor of rows, as a MasterWeight like `like`; the opposite of `plain_rows`."""
    model = on_this_rank(like)
    assert isinstance(model, MasterWeight)
    local = on_this_rank(tensor)
    return as_sharded(tensor, model.rebuilt([local], local.dtype))
