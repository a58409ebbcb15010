"""A matrix kept in parts with a row for each of its rows, that FSDP2 shards and gathers as it is told.

FSDP2 asks a parameter whether it wants to be gathered in its own way (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`). A tensor subclass can say yes; to get that far it has to live through what
`fully_shard` does to a parameter before: chunk it by rows, pad it, view it flat, put it into a DTensor, move
it. `RowTensor` does those, part by part, and leaves what the parts mean to its subclasses:

    Int8Weight          q and scale; the parameter of int8_weight_only
    GatheredWeight      q and scale of a whole weight as it comes out of an 8-bit all-gather
    MasterWeight        the float32 rows of which q and scale are made for every gather

What two ranks exchange is one uint8 buffer with a row for each row of the weight, because at world size 1
FSDP2 forwards only the first tensor of several, and because short shards must be padded by ourselves (the
hook that is told the padded size refuses a buffer of another width):

    | scale, 4 bytes | 12 unused | q, K bytes |    a scale per row; 16 bytes of header keep rows aligned
    | q, K bytes |                                 scales of more than a row, which all ranks know

Rows are never cut, so a shard has its own row scales and needs no collective to be quantized. Other scales
cover rows of several ranks. They are agreed upon before (weight_amax.py) and not sent.

Shapes: N out_features (or this rank's rows of them), K in_features.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import return_and_correct_aliasing

from lptune.linear.dtensors import on_this_rank

HEADER_BYTES = 16
_aten = torch.ops.aten


class RowTensor(torch.Tensor):
    """Looks like a float matrix (N, K); holds `PARTS`, tensors of N rows each."""

    PARTS: ClassVar[tuple[str, ...]]
    """Attributes that are tensors. The first has the matrix's shape; where it is cut, all have its rows."""
    CONTEXT: ClassVar[tuple[str, ...]] = ()
    """Further attributes of plain values, which every tensor made of this one inherits."""
    full_rows: int
    """N of the whole weight, also where this is a shard of it."""

    @staticmethod
    def __new__(
        cls,
        *parts: Tensor,
        dtype: torch.dtype = torch.float32,
        full_rows: int | None = None,
        size: Sequence[int] | None = None,
        **context: Any,
    ) -> "RowTensor":
        """dtype: what it looks like to others. size: its shape, where that is not the first part's (a flat
        view).
        """
        first = parts[0]
        self: RowTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(first.shape if size is None else size), dtype=dtype, device=first.device
        )
        for name, part in zip(cls.PARTS, parts, strict=True):
            setattr(self, name, part)
        for name in cls.CONTEXT:
            setattr(self, name, context[name])
        self.full_rows = first.shape[0] if full_rows is None else full_rows
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it is kept in."""
        return tuple(getattr(self, name) for name in self.PARTS)

    def data_ptr(self) -> int:
        """Of the first part. torch says 0 for all of such; accelerate tells parameters apart by it."""
        return self.parts()[0].data_ptr()

    # torch's own copies and pickles tell such a class by an address of 0.
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restored, (type(self), vars(self), self.dtype, tuple(self.shape), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            restored, state = self.__reduce_ex__(2)
            memo[id(self)] = copied = restored(*copy.deepcopy(state, memo))
            copied.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    @property
    def data(self) -> Tensor:
        """As any tensor's. Assigned, it replaces the parts; torch would replace only the dtype it shows."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise RuntimeError(f"a weight of shape {tuple(self.shape)} got .data of {tuple(value.shape)}")
        new = value if type(value) is type(self) else self.of_plain(value)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        for name in self.PARTS:
            setattr(self, name, getattr(new, name))

    def of_plain(self, value: Tensor) -> Self:
        """A tensor of this kind that stands for `value`, a plain tensor of floats."""
        how = "load it by copy_(), train it by an optimizer of lptune.training.build_optimizer"
        raise RuntimeError(f"the .data of {self} would have to be rounded to 8 bits; {how}")

    def rebuilt(
        self, parts: Sequence[Tensor], dtype: torch.dtype | None = None, size: Sequence[int] | None = None
    ) -> Self:
        """Of the same kind, of other parts."""
        context = {name: getattr(self, name) for name in self.CONTEXT}
        return type(self)(*parts, dtype=dtype or self.dtype, full_rows=self.full_rows, size=size, **context)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """`function` of each part: something that treats rows alike and leaves their number to FSDP."""
        return self.rebuilt([function(part) for part in self.parts()], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.PARTS), (self.dtype, self.full_rows, *(getattr(self, name) for name in self.CONTEXT))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> "RowTensor":
        dtype, full_rows, *values = context
        named = dict(zip(cls.CONTEXT, values, strict=True))
        parts = [inner[name] for name in cls.PARTS]
        return cls(*parts, dtype=dtype, full_rows=full_rows, size=outer_size, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = cls.operation(func)
        if operation is not None:
            result = operation(*args, **kwargs)
            if result is not NotImplemented:
                return return_and_correct_aliasing(func, args, kwargs, result) if func in _VIEWS else result
        return cls.otherwise(func, args, kwargs)

    @classmethod
    def operation(cls, func: Any) -> Callable[..., Any] | None:
        """What `func` does to this kind of tensor; None, or a result of NotImplemented: see `otherwise`."""
        return OPERATIONS.get(func)

    @classmethod
    @abstractmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All other operators."""


def _restored(
    cls: type[RowTensor], attributes: dict[str, Any], dtype: torch.dtype, size: Any, requires_grad: bool
) -> RowTensor:
    first = attributes[cls.PARTS[0]]
    tensor: RowTensor = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=first.device)
    vars(tensor).update(attributes)
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


class Quantized(NamedTuple):
    """8-bit rows of a matrix, and the scales of these rows or of all of the matrix."""

    q_NK: Tensor  # int8 or float8
    scale: Tensor  # float32, (N, 1) of these rows, or of the whole matrix (1, 1) or one per block


class GatheredByRows(RowTensor):
    """A sharded parameter that FSDP2 gathers as 8-bit rows, by the two hooks that it looks for."""

    @abstractmethod
    def rows_to_send(self, mesh: DeviceMesh) -> Quantized:
        """This rank's rows. mesh: the axis over which the weight is sharded."""

    @abstractmethod
    def whole(self, quantized: Quantized, dtype: torch.dtype) -> RowTensor:
        """The gathered weight; q, and scales of rows, are views of the buffer. dtype: what it looks like to
        others.
        """

    @property
    @abstractmethod
    def row_dtype(self) -> torch.dtype:
        """Of the 8-bit values."""

    @property
    def header_bytes(self) -> int:
        """Of each row in the buffer: a scale per row has to be sent, others are known."""
        return HEADER_BYTES

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor | None]:
        """This rank's rows as one buffer, padded to what the first rank has; the scale, where it is not in
        there.
        """
        sent = self.rows_to_send(mesh)
        buffer = pack_rows(sent, -(-self.full_rows // mesh.size()), self.header_bytes)
        return (buffer,), None if self.header_bytes else sent.scale

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor],
        metadata: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]] | None:
        """The whole weight, as views of the gathered buffer."""
        (buffer,) = outputs
        quantized = unpack_rows(buffer, self.full_rows, self.row_dtype, self.header_bytes)
        if metadata is not None:
            quantized = quantized._replace(scale=metadata)
        weight = self.whole(quantized, param_dtype)
        if out is None:
            return weight, ()
        out = on_this_rank(out)  # as tensor parallelism left it
        assert isinstance(out, type(weight))
        # Asked of the storage, since the fake tensors of a dry run have no address.
        assert out.parts()[0].untyped_storage()._cdata == quantized.q_NK.untyped_storage()._cdata
        if metadata is not None:
            # The tensor that the first gather made serves all later ones. Its scale is filled again, as FSDP
            # does with q: `out` may be an alias, and so may what autograd has saved.
            (scale,) = out.parts()[1:]
            with torch.autograd._unsafe_preserve_version_counter(scale):  # type: ignore[attr-defined]
                scale.copy_(metadata)
            if metadata.device.type != "cpu":
                # It was made on FSDP's stream, which must not reuse its memory before this one has read it.
                metadata.record_stream(torch.accelerator.current_stream(metadata.device))
        return None


def pack_rows(quantized: tuple[Tensor, Tensor], num_rows: int, header_bytes: int = HEADER_BYTES) -> Tensor:
    """The buffer of some rows, uint8 (num_rows, header_bytes + K); those that are not there are padding, all
    zero. quantized: q and scale, which is sent where there is a header.
    """
    q_NK, scale = quantized
    n, k = q_NK.shape
    buffer = torch.zeros(num_rows, header_bytes + k, dtype=torch.uint8, device=q_NK.device)
    mine = unpack_rows(buffer, n, q_NK.dtype, header_bytes)
    mine.q_NK.copy_(q_NK)
    if header_bytes:
        mine.scale.copy_(scale)
    return buffer


def unpack_rows(
    buffer: Tensor, num_rows: int, dtype: torch.dtype, header_bytes: int = HEADER_BYTES
) -> Quantized:
    """The first `num_rows` rows of a buffer, as views of it; dtype: an 8-bit one. Without a header the scale
    has 0 columns.
    """
    rows = buffer[:num_rows]
    return Quantized(rows[:, header_bytes:].view(dtype), rows[:, : min(4, header_bytes)].view(torch.float32))


def is_matrix(tensor: Any) -> bool:
    """Whether it has the shape of its parts, and is no flat view."""
    return isinstance(tensor, RowTensor) and tensor.shape == tensor.parts()[0].shape


def _same(tensor: RowTensor, *args: Any, **kwargs: Any) -> RowTensor:
    return tensor.rebuilt(tensor.parts(), size=tensor.shape)


def _clone(tensor: RowTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor.map(lambda part: part.clone()) if is_matrix(tensor) else NotImplemented


def _view(tensor: RowTensor, size: Sequence[int]) -> Any:
    # FSDP keeps a flat view for its own gather, which it does not use where a tensor has hooks.
    if tuple(size) not in ((-1,), (tensor.numel(),), tuple(tensor.shape)):
        return NotImplemented
    shape = tuple(tensor.shape) if len(size) == tensor.dim() else (tensor.numel(),)
    return tensor.rebuilt(tensor.parts(), size=shape)


def _as_strided(
    tensor: RowTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    unchanged = (tuple(size), tuple(stride), offset or 0) == (tuple(tensor.shape), tensor.stride(), 0)
    return _same(tensor) if unchanged else NotImplemented


def _slice(tensor: RowTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim != 0 or step != 1 or not is_matrix(tensor):
        return NotImplemented
    return tensor.map(lambda part: part[start:end])


def _split(tensor: RowTensor, size: int, dim: int = 0) -> Any:
    if dim != 0 or not is_matrix(tensor):
        return NotImplemented
    return [
        tensor.map(lambda part, i=i: part[i : i + size])  # type: ignore[misc]
        for i in range(0, tensor.shape[0], size)
    ]


def _to_copy(
    tensor: RowTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    dtype = dtype or tensor.dtype
    if not dtype.is_floating_point or not is_matrix(tensor):
        return NotImplemented
    non_blocking = bool(kwargs.get("non_blocking"))
    return tensor.map(lambda part: part.to(device, non_blocking=non_blocking, copy=True), dtype)


def _empty_like(
    tensor: RowTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    if not is_matrix(tensor):
        return NotImplemented
    return tensor.map(lambda part: torch.empty_like(part, device=device).contiguous(), dtype)


def _new_zeros(tensor: RowTensor, size: Sequence[int], **kwargs: Any) -> Any:
    # What FSDP pads a shard with. Zero values, whatever the scale.
    if len(size) != 2 or size[1] != tensor.parts()[0].shape[1] or any(kwargs.values()):
        return NotImplemented
    return tensor.map(lambda part: part.new_zeros((size[0], part.shape[1])))


def _pin_memory(tensor: RowTensor, device: Any = None) -> Any:
    # FSDP pins what it offloads to the host. A plain tensor in return would have no hooks, and the weight
    # would be gathered in high precision.
    return tensor.map(lambda part: part.pin_memory()) if is_matrix(tensor) else NotImplemented


def _is_pinned(tensor: RowTensor, device: Any = None) -> bool:
    return all(part.is_pinned() for part in tensor.parts())


def _zeros_like(
    tensor: RowTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    # Moments and gradients of a weight are plain.
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


_VIEWS = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
)
CUTTING = (_aten.slice.Tensor, _aten.split.Tensor, _aten.new_zeros.default)
"""What makes a tensor of other rows."""
OPERATIONS: dict[Any, Callable[..., Any]] = {
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
    _aten._pin_memory.default: _pin_memory,
    _aten.is_pinned.default: _is_pinned,
}
"""What every RowTensor lives through."""
