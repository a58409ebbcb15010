"""Int8Weight: a weight that is stored in INT8, the parameter of `int8_weight_only`.

An `Int8Weight` looks like a float matrix (N, K) and stores `q_NK` (int8) and `scale_N1` (float32), one scale
per row. It needs a quarter of the memory of a float32 master weight, and has no master weight beside it.
Three kinds of operations are allowed:

- multiplying by it, in the op that takes q and scale (kernels.weight_only_mm);
- filling it: `copy_` (loading a checkpoint) and the initializers of nn.init quantize to nearest;
- updating it, by an optimizer that rounds stochastically (training/chunked_adamw.py). Other in-place
  arithmetic is an error: rounding to nearest loses each update below half a step, and such a run looks
  healthy.

All other operations that read it get the dequantized values, in an ordinary tensor.

FSDP2 shards and gathers q and scale (row_tensor.py). In a gathered weight they are views of the all-gather
buffer, which FSDP frees and fills again.

A checkpoint does not depend on the precision: it stores q * scale under the weight's name, as of any weight.
The scales are stored beside it, under INT8_SCALE/NAME: they cannot be recomputed from the values, which may
be rounded to bfloat16, and after stochastic rounding a row may have no 127. A checkpoint can be loaded
without them, but the weight is then not bitwise equal.

Shapes: N out_features (or this rank's rows of them), K in_features, R ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lptune.base.errors import UserError
from lptune.kernels import Packed, Quantized, pack_rows
from lptune.linear.dtensors import as_sharded, on_this_rank
from lptune.linear.weights.master_weight import plain_rows
from lptune.linear.weights.row_tensor import GatheredByRows, RowTensor
from lptune.numerics import QuantizedRows, dequantize, quantize_rows

_aten = torch.ops.aten

INT8_SCALE = "int8_scale"
"""The prefix of an Int8Weight's scales in a checkpoint, (N, 1) float32."""


class Int8Weight(GatheredByRows):
    """A float matrix stored as INT8 rows and one scale per row: `q_NK * scale_N1`."""

    PARTS = ("q_NK", "scale_N1")

    q_NK: Tensor
    """int8 in [-127, 127]."""
    scale_N1: Tensor
    """float32, one for each row."""

    @classmethod
    def from_float(cls, w_NK: Tensor, scale_N1: Tensor | None = None) -> "Int8Weight":
        """Quantizes w_NK (N, K), of any float dtype, to nearest.

        scale_N1: the scales with which w_NK was dequantized earlier; q is then restored exactly.
        """
        weight = cls.like(w_NK)
        weight.fill_from(w_NK, scale_N1)
        return weight

    @classmethod
    def like(cls, w_NK: Tensor) -> "Int8Weight":
        """Storage for a weight of this shape, dtype and device; its values are unspecified."""
        q_NK = torch.empty(w_NK.shape, dtype=torch.int8, device=w_NK.device)
        scale_N1 = torch.empty((w_NK.shape[0], 1), dtype=torch.float32, device=w_NK.device)
        return cls(q_NK, scale_N1, dtype=w_NK.dtype)

    @torch.no_grad()
    def fill_from(self, w_NK: Tensor, scale_N1: Tensor | None = None) -> None:
        """Overwrites the weight with `w_NK`; arguments as in `from_float`."""
        if self.q_NK.is_meta:
            return
        w32_NK = w_NK.to(device=self.device, dtype=torch.float32)
        if scale_N1 is None:
            self.store(slice(None), quantize_rows(w32_NK.expand(self.q_NK.shape)))
            return
        # fl(q * s) / s is within 2**-23 of an integer no larger than 127, so it rounds to q: bit for bit.
        scale_N1 = scale_N1.to(self.device)
        q_NK = torch.where(scale_N1 == 0, 0.0, w32_NK / scale_N1).round()
        self.store(slice(None), QuantizedRows(q_NK.clamp(-127, 127).to(torch.int8), scale_N1))

    def store(self, rows: slice, quantized: QuantizedRows) -> None:
        """Overwrites the rows `rows` with 8-bit rows and their scales."""
        self.q_NK[rows].copy_(quantized.q_MK)
        self.scale_N1[rows].copy_(quantized.scale_M1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """`q * scale` in float32, rounded once to `dtype` (None: self.dtype), as an ordinary tensor."""
        w_NK = dequantize(QuantizedRows(self.q_NK, self.scale_N1), dtype or self.dtype)
        return w_NK.view(self.shape)

    @classmethod
    def operation(cls, func: Any) -> Callable[..., Any] | None:
        """See RowTensor. Adds `copy_` and the initializers, which quantize to nearest."""
        return _FILLING.get(func) or super().operation(func)

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `func` with dequantized values. Raises if `func` writes to an Int8Weight."""
        if func.namespace == "c10d":
            # A collective would send and receive dequantized copies, and never write to the weight.
            raise UserError(
                f"precision.kind: int8_weight_only does not allow {func} on its weights (parallelize_module "
                "with torch's styles does it); cut them by the styles of lptune.distributed "
                "(docs/distributed.md), or choose another kind"
            )
        if _writes_to_int8(func, args, kwargs):
            raise RuntimeError(
                f"{func} in place on an INT8 weight would round to nearest, and small updates would be lost; "
                "train it with lptune.training.build_optimizer, which rounds stochastically"
            )
        plain_args, plain_kwargs = tree_map_only(Int8Weight, Int8Weight.dequantize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def rows_to_send(self, mesh: DeviceMesh, num_rows: int) -> Packed:
        return Packed(pack_rows((self.q_NK, self.scale_N1), num_rows), None)

    def whole(self, quantized: Quantized, dtype: torch.dtype) -> RowTensor:
        return Int8Weight(*quantized, dtype=dtype, full_rows=self.full_rows)

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.int8


def int8_rows(tensor: Tensor) -> Int8Weight | None:
    """`tensor` if it is an Int8Weight; this rank's Int8Weight if it is a DTensor of one; else None."""
    local = on_this_rank(tensor)
    return local if isinstance(local, Int8Weight) else None


@torch.no_grad()
def dequantized(tensor: Tensor) -> Tensor:
    """`tensor` as float values: of an Int8Weight the dequantized values, of a MasterWeight its live rows, and
    any other tensor itself. A DTensor gives a DTensor with the same placements.
    """
    rows = int8_rows(tensor)
    return plain_rows(tensor) if rows is None else as_sharded(tensor, rows.dequantize())


@torch.no_grad()
def quantized(tensor: Tensor, scale_N1: Tensor | None = None, like: Tensor | None = None) -> Tensor:
    """`tensor` as an Int8Weight, with the placements of `tensor`; the inverse of `dequantized`.

    tensor: float values, or a DTensor of rows. scale_N1: see `Int8Weight.from_float`. like: the parameter
    that the result replaces; tensor parallelism may have cut its rows.
    """
    if not isinstance(tensor, DTensor):
        return Int8Weight.from_float(tensor, scale_N1)
    local_scale_N1 = None if scale_N1 is None else on_this_rank(scale_N1)
    weight = Int8Weight.from_float(tensor.to_local(), local_scale_N1)
    replaced = None if like is None else int8_rows(like)
    weight.full_rows = tensor.shape[0] if replaced is None else replaced.full_rows
    return as_sharded(tensor, weight)


@torch.no_grad()
def row_scales(tensor: Tensor) -> Tensor:
    """The live scales (N, 1) of an Int8Weight, or of a DTensor of one, with its placements."""
    rows = int8_rows(tensor)
    assert rows is not None
    return as_sharded(tensor, rows.scale_N1.detach())


def is_stored_in_place(tensor: Tensor) -> bool:
    """Whether the values that a checkpoint stores can be loaded into `tensor` in place: not into an
    Int8Weight, whose values `dequantized` computes for saving, and `fill_stored` loads.
    """
    return int8_rows(tensor) is None


def stored_beside(weight: Tensor) -> dict[str, Tensor]:
    """The live tensors that a checkpoint stores beside the values of `weight`, by the prefix of their name.
    They have the placements of `weight`.
    """
    return {} if int8_rows(weight) is None else {INT8_SCALE: row_scales(weight)}


def fill_stored(weight: Tensor, values: Tensor, beside: Mapping[str, Tensor]) -> None:
    """Fills a weight that is not stored in place, with tensors of a checkpoint.

    values: with the placements of `weight`. beside: by prefix, as in `stored_beside`; a scale that the
    checkpoint lacks is computed from the values.
    """
    rows = int8_rows(weight)
    assert rows is not None
    scale = beside.get(INT8_SCALE)
    rows.fill_from(on_this_rank(values), None if scale is None else on_this_rank(scale))


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, Int8Weight):
        return NotImplemented
    if isinstance(source, Int8Weight) and source.shape == target.shape:
        if not target.is_meta:
            target.store(slice(None), QuantizedRows(source.q_NK, source.scale_N1))
    else:
        target.fill_from(source.dequantize() if isinstance(source, Int8Weight) else source)
    return target


def _initialize(func: Any) -> Callable[..., Tensor]:
    def fill(weight: Int8Weight, *args: Any, **kwargs: Any) -> Tensor:
        values = torch.empty(weight.q_NK.shape, dtype=weight.dtype, device=weight.device)
        weight.fill_from(func(values, *args, **kwargs))
        return weight

    return fill


_INITIALIZERS = (
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.normal_.default,
    _aten.uniform_.default,
)
_FILLING: dict[Any, Callable[..., Any]] = {
    _aten.copy_.default: _copy_,
    **{func: _initialize(func) for func in _INITIALIZERS},
}


def _writes_to_int8(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not func._schema.is_mutable:
        return False
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(each, Int8Weight) for each in written):
                return True
    return False
