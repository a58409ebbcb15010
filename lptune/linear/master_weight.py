"""Weights that FSDP2 gathers in 8 bits: `precision.all_gather: low`.

A layer with row scales multiplies by the 8-bit rows of its weight and by nothing else. So that is what ranks
need to exchange: each quantizes its own rows and sends values and scales, half the bytes of bfloat16, and no
collective is needed to find a scale, since rows are sharded whole.

    MasterWeight     the sharded float32 parameter; an ordinary tensor to everybody but FSDP
    GatheredWeight   the whole weight, q and scale, as the layer's forward and backward see it

Rows are cast to the compute dtype before they are quantized, as on the path where FSDP gathers the compute
dtype and the layer quantizes: the two give the same bits, in losses and in weights after any number of steps.

The 8-bit rows are made anew for every gather, from the weight as it is then: no scale can be older than its
weight.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lptune.kernels import note_gather, quantize_rows
from lptune.linear.row_tensor import HEADER_BYTES, GatheredByRows, RowTensor, as_sharded
from lptune.numerics import FORMATS, QuantizedRows, dequantize


class GatheredWeight(RowTensor):
    """q and scale of a whole weight, views of the buffer that was gathered; looks like the compute dtype."""

    PARTS = ("q_NK", "scale_N1")

    q_NK: Tensor
    """int8 or float8."""
    scale_N1: Tensor
    """float32."""

    def rows(self) -> QuantizedRows:
        """What the GEMMs consume."""
        return QuantizedRows(self.q_NK, self.scale_N1)

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whoever reads it sees the dequantized values; nobody writes to it."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would change a gathered weight; change the sharded parameter")

        def dequantized(weight: GatheredWeight) -> Tensor:
            return dequantize(weight.rows(), weight.dtype).view(weight.shape)

        plain_args, plain_kwargs = tree_map_only(GatheredWeight, dequantized, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


class MasterWeight(GatheredByRows):
    """Float rows of which 8-bit rows are made for each gather. Every operator acts on the rows themselves."""

    PARTS = ("rows_NK",)
    CONTEXT = ("number", "fmt", "power_of_two", "compute_dtype")

    rows_NK: Tensor
    """The weight, or this rank's part of it; live storage."""
    number: int
    """Of its layer, for the count of gathers."""
    fmt: str
    """A key of numerics.FORMATS."""
    power_of_two: bool
    compute_dtype: torch.dtype

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer, an initializer or a loader reads and writes the rows in place."""

        def live(weight: MasterWeight) -> Tensor:
            return weight.rows_NK.view(weight.shape)

        plain_args, plain_kwargs = tree_map_only(MasterWeight, live, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def rows_to_send(self) -> QuantizedRows:
        """Made now, from the rows as they are, rounded to the compute dtype first."""
        rows_NK = self.rows_NK.to(self.compute_dtype)
        return quantize_rows(rows_NK, self.fmt, power_of_two=self.power_of_two)

    def whole(self, rows: QuantizedRows, dtype: torch.dtype) -> RowTensor:
        """A GatheredWeight; counted."""
        assert dtype == self.compute_dtype, (dtype, self.compute_dtype)
        note_gather(self.number, rows.q_MK.untyped_storage().nbytes())
        return GatheredWeight(*rows, dtype=dtype, full_rows=self.full_rows)

    @property
    def row_dtype(self) -> torch.dtype:
        """That of the format."""
        return FORMATS[self.fmt].dtype


def make_master(
    linear: nn.Linear, number: int, fmt: str, power_of_two: bool, compute_dtype: torch.dtype
) -> None:
    """Makes the weight of `linear` a MasterWeight: the same Parameter, before `fully_shard`.

    number: what the kernels know the layer by.
    """
    old = linear.weight
    context = {"number": number, "fmt": fmt, "power_of_two": power_of_two, "compute_dtype": compute_dtype}
    # What tensor parallelism left to this rank is the whole weight of its FSDP axis.
    whole = old.detach()
    rows_NK = whole.to_local() if isinstance(whole, DTensor) else whole
    local = MasterWeight(rows_NK, dtype=old.dtype, full_rows=None, size=None, **context)
    master = as_sharded(whole, local)
    torch.utils.swap_tensors(old, nn.Parameter(master, requires_grad=old.requires_grad))


def is_master(tensor: Tensor) -> bool:
    """Whether `tensor` is a MasterWeight, or a DTensor of one."""
    return isinstance(tensor.to_local() if isinstance(tensor, DTensor) else tensor, MasterWeight)


def gather_bytes(weight: DTensor) -> int:
    """What an 8-bit gather of a sharded (N, K) weight brings to a rank: 16 + K a row, padding included."""
    mesh = weight.device_mesh
    num_ranks = mesh.size((mesh.mesh_dim_names or ("fsdp",)).index("fsdp"))
    local = weight.to_local()
    rows = local.full_rows if isinstance(local, RowTensor) else weight.shape[0]
    return -(-rows // num_ranks) * num_ranks * (HEADER_BYTES + local.shape[1])


def plain_rows(tensor: Tensor) -> Tensor:
    """`tensor`, or the live rows where it is a MasterWeight; in a DTensor as it was, if it was in one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, MasterWeight):
        return tensor
    return as_sharded(tensor, local.rows_NK)


def master_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, plain or a DTensor of rows, as a MasterWeight like `like`; the opposite of `plain_rows`."""
    model = like.to_local() if isinstance(like, DTensor) else like
    assert isinstance(model, MasterWeight)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return as_sharded(tensor, model.rebuilt([local], local.dtype))
