"""Weights that FSDP2 gathers in 8 bits: `precision.all_gather: low`.

If the GEMMs of a layer need only one set of 8-bit values of its weight, other ranks need only these values.
(`mxfp8` and `grad_input=column` need two, along K and along N, and have no 8-bit gather.) Each rank quantizes
its own rows and sends them, which takes half the bytes of bfloat16.

    MasterWeight     the sharded float32 parameter; behaves like an ordinary tensor, except under FSDP
    GatheredWeight   q and scale of the whole weight, for the forward and backward of the layer

Both are RowTensors (row_tensor.py), which explains PARTS, CONTEXT and the methods that they override.

    scale per row              computed by the rank that has the row, and sent with the row
    scale per tensor or block  computed from the amax over all ranks (weight_amax.py), not sent

Rows are cast to the compute dtype before they are quantized. Without an 8-bit gather, FSDP gathers the
compute dtype and the layer quantizes. Both ways give the same bits, in losses and in weights.

Rows are quantized again for every gather, from the current weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lptune.base.errors import UserError
from lptune.kernels import Packed, Quantized, dequantize_rotated, note_gather, unpack_ternary
from lptune.linear.dtensors import as_sharded, on_this_rank
from lptune.linear.kind import Agree, LinearSpec, Shard
from lptune.linear.weights.row_tensor import CUTTING, GatheredByRows, RowTensor
from lptune.linear.weights.weight_amax import first_row, whole_amax
from lptune.numerics import FORMATS, QuantizedBlocks, QuantizedTensor, dequantize, dequantize_blocks


class GatheredWeight(RowTensor):
    """q and scale of a whole weight. q is a view of the all-gather buffer. `dtype` is the compute dtype,
    which its dequantized values have. An operation that writes is refused.
    """

    PARTS = ("q_NK", "scale")
    CONTEXT = ("block", "rotated")

    q_NK: Tensor
    """int8 or float8; uint8 (N, K / 4), four ternary codes in each."""
    scale: Tensor
    """float32: (N, 1), (1, 1), or (ceil(N / block), ceil(K / block))."""
    block: int | None
    """Side of the square scale blocks; None for a scale per row or one scale."""
    rotated: bool
    """Whether q and scale are those of the rotated weight; dequantized values are rotated back."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """`q * scale` in float32, rounded once to `dtype` (None: self.dtype), as an ordinary tensor."""
        dtype = dtype or self.dtype
        if self.q_NK.dtype == torch.uint8:
            return dequantize(QuantizedTensor(unpack_ternary(self.q_NK), self.scale), dtype)
        if self.rotated:
            return dequantize_rotated((self.q_NK, self.scale), dtype)
        if self.block is None:
            return dequantize(QuantizedTensor(self.q_NK, self.scale), dtype)
        return dequantize_blocks(QuantizedBlocks(self.q_NK, self.scale), (self.block, self.block), dtype)

    @classmethod
    def operation(cls, func: Any) -> Callable[..., Any] | None:
        """See RowTensor. A part of a gathered weight would not fit its scales: slices and the like go to
        `otherwise`, and return dequantized values.
        """
        return super().operation(func) if func not in CUTTING else None

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `func` with dequantized values. Raises RuntimeError if `func` writes to any argument."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would change a gathered weight; change the sharded parameter")

        def dequantized(weight: GatheredWeight) -> Tensor:
            return weight.dequantize().view(weight.shape)  # it may be a flat view

        plain_args, plain_kwargs = tree_map_only(GatheredWeight, dequantized, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


class MasterWeight(GatheredByRows):
    """Float rows that are quantized for each gather. Operators that RowTensor does not define act on the rows
    as on any float tensor.
    """

    PARTS = ("rows_NK",)
    CONTEXT = ("number", "spec", "compute_dtype")

    rows_NK: Tensor
    """The weight, or this rank's rows of it; live storage."""
    number: int
    """The layer number, for the count of gathers and the amaxes."""
    spec: LinearSpec
    compute_dtype: torch.dtype

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `func` with the live rows, so optimizers, initializers and loaders write to them."""

        def live(weight: MasterWeight) -> Tensor:
            return weight.rows_NK.view(weight.shape)  # it may be a flat view, which FSDP makes

        plain_args, plain_kwargs = tree_map_only(MasterWeight, live, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "MasterWeight":
        """See RowTensor. dtype: also the rows are cast to it, as they are what operators read."""
        return self.rebuilt([function(self.rows_NK).to(dtype or self.dtype)], dtype)

    def of_plain(self, value: Tensor) -> "MasterWeight":
        """A MasterWeight whose rows are `value` itself, without a copy."""
        return self.rebuilt([value.detach()], value.dtype)

    def rows_to_send(self, mesh: DeviceMesh, num_rows: int) -> Packed:
        """The current rows, rounded to the compute dtype, quantized and packed."""
        return self.spec.kind.pack_shard(self.spec, self.shard(mesh), self._agree(mesh), num_rows)

    def quantized_rows(self, mesh: DeviceMesh) -> Quantized:
        """The current rows, rounded to the compute dtype and quantized, for a weight that is whole on this
        rank. mesh: as in `rows_to_send`.
        """
        return self.spec.kind.quantize_shard(self.spec, self.shard(mesh), self._agree(mesh))

    def _agree(self, mesh: DeviceMesh) -> Agree:
        """Finds the amaxes (B, C) of the scale blocks over all ranks; kinds with row scales need none."""
        return lambda mine_BC: whole_amax(self.number, mine_BC, mesh)

    def shard(self, mesh: DeviceMesh) -> Shard:
        """The current rows of this rank, and their position in the weight. mesh: the axis over which the
        weight is sharded.
        """
        first, block = first_row(self.full_rows, mesh), self.spec.kind.weight_block
        mean_scale = self.spec.kind.mean_scale
        return Shard(self.rows_NK, first, self.full_rows, block, self.compute_dtype, mean_scale)

    def whole(self, quantized: Quantized, dtype: torch.dtype) -> RowTensor:
        """A GatheredWeight; counts the gather. Raises UserError if `dtype`, from FSDP's mixed-precision
        policy, is not the compute dtype.
        """
        if dtype != self.compute_dtype:
            raise UserError(
                f"gather_in_8_bits() was called with compute_dtype={self.compute_dtype}, and fully_shard's "
                f"mixed-precision policy has param_dtype {dtype}; they must be the same"
            )
        note_gather(self.number, quantized.q_NK.untyped_storage().nbytes())
        kind, (n, num_bytes) = self.spec.kind, quantized.q_NK.shape
        context = {"block": kind.weight_block, "rotated": self.spec.rotated}
        size = (n, num_bytes * kind.weights_in_byte)
        return GatheredWeight(*quantized, dtype=dtype, full_rows=self.full_rows, size=size, **context)

    @property
    def row_dtype(self) -> torch.dtype:
        kind = self.spec.kind
        return torch.uint8 if kind.weights_in_byte > 1 else FORMATS[kind.fmt].dtype

    @property
    def header_bytes(self) -> int:
        return self.spec.kind.header_bytes


def make_master(linear: nn.Linear, number: int, spec: LinearSpec, compute_dtype: torch.dtype) -> None:
    """Turns the weight of `linear` into a MasterWeight; the Parameter stays the same object. Call it before
    `fully_shard`. number: the layer number.
    """
    old = linear.weight
    context = {"number": number, "spec": spec, "compute_dtype": compute_dtype}
    # FSDP gathers this rank's part of tensor parallelism, so that part is the whole weight here.
    weight = old.detach()
    rows_NK = on_this_rank(weight)
    local = MasterWeight(rows_NK, dtype=old.dtype, full_rows=None, size=None, **context)  # as rows_NK has
    master = as_sharded(weight, local)
    torch.utils.swap_tensors(old, nn.Parameter(master, requires_grad=old.requires_grad))


def renumber(weight: Tensor, number: int) -> None:
    """Sets the layer number of a MasterWeight, or of a DTensor of one: a copied layer gets its own number."""
    # Not on_this_rank: `to_local` returns a view, which has a number of its own.
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    assert isinstance(local, MasterWeight)
    local.number = number


def is_master(tensor: Tensor) -> bool:
    """Whether `tensor` is a MasterWeight, or a DTensor of one."""
    return isinstance(on_this_rank(tensor), MasterWeight)


def gather_bytes(shape: Sequence[int], num_ranks: int, spec: LinearSpec) -> int:
    """Bytes of the gathered buffer of a weight of `shape` (N, K), sharded over `num_ranks` ranks. Rows of
    K bytes (ternary: K / 4), with a header if they have their own scales; padding rows count too.
    """
    rows = -(-shape[0] // num_ranks) * num_ranks
    return rows * (spec.kind.header_bytes + shape[1] // spec.kind.weights_in_byte)


def planned_bytes(weight: Tensor, spec: LinearSpec) -> int:
    """`gather_bytes` of a weight that FSDP shards. Under tensor parallelism FSDP gathers this rank's part. Of
    a weight that is whole on one rank: the bytes of its 8-bit copy, which needs no headers.
    """
    if not isinstance(weight, DTensor):
        return weight.numel() // spec.kind.weights_in_byte
    local = weight.to_local()
    rows = local.full_rows if isinstance(local, RowTensor) else weight.shape[0]
    return gather_bytes((rows, local.shape[1]), num_gathering_ranks(weight), spec)


def num_gathering_ranks(weight: DTensor) -> int:
    """The number of ranks over which FSDP gathers `weight`."""
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    # Only the axis `fsdp` counts: replicas (HSDP) gather separately. A user's mesh may have other axis names.
    # Then the first axis is FSDP's over which the weight is not replicated: FSDP2 wants its axis before that
    # of tensor parallelism.
    if "fsdp" in names:
        return mesh.size(names.index("fsdp"))
    sharded = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    return mesh.size(sharded[0]) if sharded else 1


def plain_rows(tensor: Tensor) -> Tensor:
    """The live rows of a MasterWeight, or of a DTensor of one, with its placements; else `tensor` itself."""
    local = on_this_rank(tensor)
    if not isinstance(local, MasterWeight):
        return tensor
    return as_sharded(tensor, local.rows_NK)


def master_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, float values or a DTensor of rows, as a MasterWeight with the layer number, spec and compute
    dtype of `like`; the inverse of `plain_rows`.
    """
    pattern = on_this_rank(like)
    assert isinstance(pattern, MasterWeight)
    local = on_this_rank(tensor)
    return as_sharded(tensor, pattern.rebuilt([local], local.dtype))
