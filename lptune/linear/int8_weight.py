"""A weight that is stored in INT8: the parameter of `int8_weight_only`.

`Int8Weight` looks like a float matrix (N, K) and holds `q_NK` (int8) and `scale_N1` (float32), one scale per
row: a quarter of a float32 master weight's memory, and there is no master weight beside it. Three things may
be done to it:

- it is multiplied with, by the op that consumes q and scale (weight_only.py);
- it is filled: `copy_` (loading a checkpoint) and the initializers of nn.init quantize to nearest;
- it is updated by an optimizer that rounds stochastically (training/optimizer.py). Any other arithmetic in
  place is an error: rounding to nearest loses each update below half a step, and such a run looks healthy.

Whatever else reads it sees the dequantized values, in a plain tensor.

Rows are never cut: FSDP shards by rows, so a shard has its own scales and needs no collective to be
quantized. Under FSDP2 the weight is gathered as it is stored, through two hooks. What they exchange is one
uint8 buffer with a row for each row of the weight,

    | scale, 4 bytes | 12 unused | q, K bytes |        16 bytes of header keep rows aligned

because at world size 1 FSDP2 forwards only the first tensor of several, and because short shards must be
padded by ourselves (the hook that is told the padded size refuses a buffer of another width). q and scale of
the gathered weight are views of that buffer, which FSDP frees and fills again.

Shapes: N out_features (or this rank's rows of them), K in_features, R ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from lptune.numerics import QuantizedRows, dequantize, quantize_rows

_HEADER_BYTES = 16
_aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A float matrix of which INT8 rows and their scales are kept: `q_NK * scale_N1`."""

    q_NK: Tensor
    """int8 in [-127, 127]."""
    scale_N1: Tensor
    """float32."""
    full_rows: int
    """N of the whole weight, also where this is a shard of it."""

    @staticmethod
    def __new__(
        cls,
        q_NK: Tensor,
        scale_N1: Tensor,
        dtype: torch.dtype = torch.float32,
        full_rows: int | None = None,
        size: Sequence[int] | None = None,
    ) -> "Int8Weight":
        """dtype: what it looks like to others, and what its gradients are accumulated in. size: its shape,
        where that is not q's (a flat view).
        """
        self: Int8Weight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(q_NK.shape if size is None else size), dtype=dtype, device=q_NK.device
        )
        self.q_NK, self.scale_N1 = q_NK, scale_N1
        self.full_rows = q_NK.shape[0] if full_rows is None else full_rows
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def from_float(cls, w_NK: Tensor, scale_N1: Tensor | None = None) -> "Int8Weight":
        """w_NK: any float dtype, (N, K). Rounded to nearest, or restored exactly where `scale_N1` is the one
        that it was dequantized by.
        """
        weight = cls.like(w_NK)
        weight.fill_from(w_NK, scale_N1)
        return weight

    @classmethod
    def like(cls, w_NK: Tensor) -> "Int8Weight":
        """Storage for a weight of this shape, dtype and device; its values are unspecified."""
        q_NK = torch.empty(w_NK.shape, dtype=torch.int8, device=w_NK.device)
        scale_N1 = torch.empty((w_NK.shape[0], 1), dtype=torch.float32, device=w_NK.device)
        return cls(q_NK, scale_N1, w_NK.dtype)

    @torch.no_grad()
    def fill_from(self, w_NK: Tensor, scale_N1: Tensor | None = None) -> None:
        """Overwrites the weight with `w_NK`, as `from_float` does."""
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
        """Overwrites `rows`."""
        self.q_NK[rows].copy_(quantized.q_MK)
        self.scale_N1[rows].copy_(quantized.scale_M1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """`q * scale` in float32, rounded once to `dtype` (its own, if None), as a plain tensor."""
        w_NK = dequantize(QuantizedRows(self.q_NK, self.scale_N1), dtype or self.dtype)
        return w_NK.view(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int]]:
        return ["q_NK", "scale_N1"], (self.dtype, self.full_rows)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, int], outer_size: Any, outer_stride: Any
    ) -> "Int8Weight":
        return Int8Weight(inner["q_NK"], inner["scale_N1"], *context, size=outer_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OPS:
            result = _OPS[func](*args, **kwargs)
            if result is not NotImplemented:
                return return_and_correct_aliasing(func, args, kwargs, result) if func in _VIEWS else result
        if _writes_to_int8(func, args, kwargs):
            raise RuntimeError(
                f"{func} in place on an INT8 weight would round to nearest, and small updates would be lost; "
                "train it with lptune.training.build_optimizer, which rounds stochastically"
            )
        plain_args, plain_kwargs = tree_map_only(Int8Weight, Int8Weight.dequantize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """This rank's rows as one buffer, padded to what the first rank has."""
        num_rows, k = -(-self.full_rows // mesh.size()), self.shape[1]
        buffer = torch.zeros(num_rows, _HEADER_BYTES + k, dtype=torch.uint8, device=self.device)
        mine = _views(buffer, self.shape[0])
        mine.q_MK.copy_(self.q_NK)
        mine.scale_M1.copy_(self.scale_N1)
        return (buffer,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """The whole weight, as views of the gathered buffer."""
        (buffer,) = outputs
        if out is not None:
            assert isinstance(out, Int8Weight)
            assert out.q_NK.data_ptr() == buffer.data_ptr() + _HEADER_BYTES
            return None
        return Int8Weight(*_views(buffer, self.full_rows), param_dtype, self.full_rows), ()


def _views(buffer: Tensor, num_rows: int) -> QuantizedRows:
    rows = buffer[:num_rows]
    return QuantizedRows(rows[:, _HEADER_BYTES:].view(torch.int8), rows[:, :4].view(torch.float32))


def int8_rows(tensor: Tensor) -> Int8Weight | None:
    """The Int8Weight that `tensor` is, or that a DTensor holds of it on this rank; None for any other."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local if isinstance(local, Int8Weight) else None


@torch.no_grad()
def dequantized(tensor: Tensor) -> Tensor:
    """`tensor` with plain values: itself, or where it is an Int8Weight (also in a DTensor) what that stands
    for.
    """
    rows = int8_rows(tensor)
    return tensor if rows is None else _as_sharded(tensor, rows.dequantize())


@torch.no_grad()
def quantized(tensor: Tensor, scale_N1: Tensor | None = None) -> Tensor:
    """`tensor`, plain or a DTensor of rows, as an Int8Weight in the same sharding; the opposite of
    `dequantized`. scale_N1: see `Int8Weight.from_float`.
    """
    if not isinstance(tensor, DTensor):
        return Int8Weight.from_float(tensor, scale_N1)
    scale_N1 = scale_N1.to_local() if isinstance(scale_N1, DTensor) else scale_N1
    weight = Int8Weight.from_float(tensor.to_local(), scale_N1)
    weight.full_rows = tensor.shape[0]
    return _as_sharded(tensor, weight)


@torch.no_grad()
def row_scales(tensor: Tensor) -> Tensor:
    """The scales (N, 1) of an Int8Weight, sharded as it is; live storage."""
    rows = int8_rows(tensor)
    assert rows is not None
    return _as_sharded(tensor, rows.scale_N1.detach())


def _as_sharded(tensor: Tensor, local: Tensor) -> Tensor:
    """`local`, this rank's rows, in a DTensor if `tensor` is one."""
    if not isinstance(tensor, DTensor):
        return local
    size = torch.Size((tensor.shape[0], local.shape[1]))
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=(size[1], 1)
    )


def _map(
    weight: Int8Weight, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Int8Weight:
    """`function` of both parts: something that treats rows alike and leaves their number to FSDP."""
    q_NK, scale_N1 = function(weight.q_NK), function(weight.scale_N1)
    return Int8Weight(q_NK, scale_N1, dtype or weight.dtype, weight.full_rows)


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Int8Weight) and weight.shape == weight.q_NK.shape


def _same(weight: Int8Weight, *args: Any, **kwargs: Any) -> Int8Weight:
    size = weight.shape
    return Int8Weight(weight.q_NK, weight.scale_N1, weight.dtype, weight.full_rows, size)


def _clone(weight: Int8Weight, *args: Any, **kwargs: Any) -> Any:
    return _map(weight, lambda part: part.clone()) if _is_matrix(weight) else NotImplemented


def _view(weight: Int8Weight, size: Sequence[int]) -> Any:
    # FSDP keeps a flat view for its own gather, which it does not use where a tensor has hooks.
    if tuple(size) not in ((-1,), (weight.numel(),), tuple(weight.shape)):
        return NotImplemented
    shape = tuple(weight.shape) if len(size) == weight.dim() else (weight.numel(),)
    return Int8Weight(weight.q_NK, weight.scale_N1, weight.dtype, weight.full_rows, shape)


def _as_strided(
    weight: Int8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    unchanged = (tuple(size), tuple(stride), offset or 0) == (tuple(weight.shape), weight.stride(), 0)
    return _same(weight) if unchanged else NotImplemented


def _slice(weight: Int8Weight, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim != 0 or step != 1 or not _is_matrix(weight):
        return NotImplemented
    return _map(weight, lambda part: part[start:end])


def _split(weight: Int8Weight, size: int, dim: int = 0) -> Any:
    if dim != 0 or not _is_matrix(weight):
        return NotImplemented
    return [_map(weight, lambda part, i=i: part[i : i + size]) for i in range(0, weight.shape[0], size)]  # type: ignore[misc]


def _to_copy(
    weight: Int8Weight, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point or not _is_matrix(weight):
        return NotImplemented
    non_blocking = bool(kwargs.get("non_blocking"))
    return _map(weight, lambda part: part.to(device, non_blocking=non_blocking, copy=True), dtype)


def _empty_like(
    weight: Int8Weight, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    if not _is_matrix(weight):
        return NotImplemented
    return _map(weight, lambda part: torch.empty_like(part, device=device).contiguous(), dtype)


def _new_zeros(weight: Int8Weight, size: Sequence[int], **kwargs: Any) -> Any:
    # What FSDP pads a shard with. Zero values, whatever the scale.
    if len(size) != 2 or size[1] != weight.q_NK.shape[1] or any(kwargs.values()):
        return NotImplemented
    return _map(weight, lambda part: part.new_zeros((size[0], part.shape[1])))


def _zeros_like(
    weight: Int8Weight, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    # Moments and gradients of an INT8 weight are plain.
    return torch.zeros(weight.shape, dtype=dtype or weight.dtype, device=device or weight.device)


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
_VIEWS = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
)
_OPS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten.as_strided.default: _as_strided,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.empty_like.default: _empty_like,
    _aten.new_zeros.default: _new_zeros,
    _aten.zeros_like.default: _zeros_like,
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
