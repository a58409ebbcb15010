"""RowTensor: a matrix stored as row-aligned tensors (q, scale), which FSDP2 shards and gathers together.

FSDP2 lets a tensor subclass define its own all-gather, by the methods `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. But first `fully_shard` applies other operations to the parameter: it chunks it by
rows, pads it, views it as flat, puts it into a DTensor, and moves it. `RowTensor` applies these operations to
each of its parts. Its subclasses define what the parts mean:

    Int8Weight          q and scale; the parameter of int8_weight_only
    GatheredWeight      q and scale of a whole weight, from an 8-bit all-gather
    MasterWeight        the float32 rows that are quantized for every gather

Ranks exchange one uint8 buffer with one row per row of the weight (lptune/kernels/packed_rows.py). It is a
single tensor, because at world size 1 FSDP2 passes on only the first of several tensors. It is padded here,
because FSDP2's hook with the padded size refuses a buffer of another width.

FSDP does not divide rows, so a rank computes the row scales of its shard without communication. Other scales
cover rows of several ranks. The ranks agree on these before the gather (weight_amax.py) and do not send them.

Shapes: N out_features (or this rank's rows of them), K in_features.
"""

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import return_and_correct_aliasing

from lptune.kernels import HEADER_BYTES, Packed, Quantized, unpack_rows
from lptune.linear.dtensors import on_this_rank

_aten = torch.ops.aten


class RowTensor(torch.Tensor):
    """Looks like a float matrix (N, K); stores the tensors named in `PARTS`."""

    PARTS: ClassVar[tuple[str, ...]]
    """Names of the tensor attributes. The first has the matrix's shape. To be sliced, all need N rows."""
    CONTEXT: ClassVar[tuple[str, ...]] = ()
    """Names of other attributes, plain values, which a tensor made of this one copies."""
    full_rows: int
    """N of the whole weight. A shard has the same value."""

    @staticmethod
    def __new__(
        cls,
        *parts: Tensor,
        dtype: torch.dtype = torch.float32,
        full_rows: int | None = None,
        size: Sequence[int] | None = None,
        **context: Any,
    ) -> "RowTensor":
        """parts: in the order of PARTS. dtype: the dtype that it shows. size: its shape, if that is not the
        first part's (a flat view). context: the attributes named in CONTEXT.
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
        """The tensors that store it, in the order of PARTS."""
        return tuple(getattr(self, name) for name in self.PARTS)

    def data_ptr(self) -> int:
        """The address of the first part. torch would return 0; accelerate tells parameters apart by it."""
        return self.parts()[0].data_ptr()

    # torch's own methods recognise a wrapper subclass by an address of 0, which this class does not have.
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
        """As for any tensor. Assignment replaces the parts too; torch would only replace the dtype."""
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
        """A tensor of this class with the values of a float tensor. RuntimeError if that would round."""
        how = "load it by copy_(), train it by an optimizer of lptune.training.build_optimizer"
        raise RuntimeError(f"the .data of {self} would have to be rounded to 8 bits; {how}")

    def rebuilt(
        self, parts: Sequence[Tensor], dtype: torch.dtype | None = None, size: Sequence[int] | None = None
    ) -> Self:
        """A tensor of this class with the same CONTEXT and other parts. dtype, size: as in `__new__`."""
        context = {name: getattr(self, name) for name in self.CONTEXT}
        return type(self)(*parts, dtype=dtype or self.dtype, full_rows=self.full_rows, size=size, **context)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Applies `function` to each part. function: treats all rows alike; `full_rows` stays the same."""
        return self.rebuilt([function(part) for part in self.parts()], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.PARTS), (self.dtype, self.full_rows, *(getattr(self, name) for name in self.CONTEXT))

    def _stable_hash_for_caching(self) -> str:
        # AOTAutograd asks for it, to find compiled code that an earlier process has kept. It holds all that
        # code for this tensor depends on, and no values. torch's own would leave out the class, and warns.
        parts = [(part.shape, part.stride(), part.dtype, part.device) for part in self.parts()]
        described = (type(self).__name__, self.shape, self.requires_grad, self.__tensor_flatten__(), parts)
        return hashlib.sha256(repr(described).encode()).hexdigest()

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
        """How this class runs the operator `func`. For None or a result of NotImplemented: `otherwise`."""
        return OPERATIONS.get(func)

    @classmethod
    @abstractmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that `operation` does not implement."""


def _restored(
    cls: type[RowTensor], attributes: dict[str, Any], dtype: torch.dtype, size: Any, requires_grad: bool
) -> RowTensor:
    first = attributes[cls.PARTS[0]]
    tensor: RowTensor = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=first.device)
    vars(tensor).update(attributes)
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


class GatheredByRows(RowTensor):
    """A sharded parameter that FSDP2 gathers as 8-bit rows, by FSDP2's two hooks for tensor subclasses."""

    @abstractmethod
    def rows_to_send(self, mesh: DeviceMesh, num_rows: int) -> Packed:
        """This rank's rows in 8 bits, in a buffer of `num_rows` rows. mesh: the axis over which the weight is
        sharded.
        """

    @abstractmethod
    def whole(self, quantized: Quantized, dtype: torch.dtype) -> RowTensor:
        """The gathered weight, which shows `dtype`. q, and scales of rows, are views of the buffer."""

    @property
    @abstractmethod
    def row_dtype(self) -> torch.dtype:
        """The dtype of the 8-bit values."""

    @property
    def header_bytes(self) -> int:
        """Bytes before each row in the buffer, for the row's scale; 0 if scales are not sent."""
        return HEADER_BYTES

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor | None]:
        """Returns this rank's rows as one buffer, padded to the number of rows of the first rank, and the
        scale if it is not in the buffer.
        """
        sent = self.rows_to_send(mesh, -(-self.full_rows // mesh.size()))
        return (sent.buffer,), sent.scale

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor],
        metadata: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]] | None:
        """The whole weight, as views of the gathered buffer. out: the weight of an earlier gather, whose q
        FSDP has filled again; only its scale is updated here.
        """
        (buffer,) = outputs
        quantized = unpack_rows(buffer, self.full_rows, self.row_dtype, self.header_bytes)
        if metadata is not None:
            quantized = quantized._replace(scale=metadata)
        weight = self.whole(quantized, param_dtype)
        if out is None:
            return weight, ()
        out = on_this_rank(out)  # tensor parallelism makes a DTensor
        assert isinstance(out, type(weight))
        # Compare storages, not addresses: the fake tensors of a dry run have no address.
        assert out.parts()[0].untyped_storage()._cdata == quantized.q_NK.untyped_storage()._cdata
        if metadata is not None:
            # All gathers use the tensor of the first one. Its scale is overwritten in place, as FSDP does
            # with q, because `out` and the tensors that autograd saved may be aliases of it.
            (scale,) = out.parts()[1:]
            with torch.autograd._unsafe_preserve_version_counter(scale):  # type: ignore[attr-defined]
                scale.copy_(metadata)
            if metadata.device.type != "cpu":
                # The scale was made on FSDP's stream. Its memory must not be reused before this stream reads.
                metadata.record_stream(torch.accelerator.current_stream(metadata.device))
        return None


def is_matrix(tensor: Any) -> bool:
    """Whether `tensor` is a RowTensor with the shape of its first part, and not a flat view."""
    return isinstance(tensor, RowTensor) and tensor.shape == tensor.parts()[0].shape


def _same(tensor: RowTensor, *args: Any, **kwargs: Any) -> RowTensor:
    return tensor.rebuilt(tensor.parts(), size=tensor.shape)


def _clone(tensor: RowTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor.map(lambda part: part.clone()) if is_matrix(tensor) else NotImplemented


def _view(tensor: RowTensor, size: Sequence[int]) -> Any:
    # FSDP makes a flat view for its default gather, and does not use it if the tensor has hooks.
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
    # FSDP pads a shard with it. Values are 0 for any scale.
    if len(size) != 2 or size[1] != tensor.parts()[0].shape[1] or any(kwargs.values()):
        return NotImplemented
    return tensor.map(lambda part: part.new_zeros((size[0], part.shape[1])))


def _pin_memory(tensor: RowTensor, device: Any = None) -> Any:
    # FSDP pins parameters that it offloads to the host. An ordinary tensor has no hooks, and FSDP would
    # gather the weight in high precision.
    return tensor.map(lambda part: part.pin_memory()) if is_matrix(tensor) else NotImplemented


def _is_pinned(tensor: RowTensor, device: Any = None) -> bool:
    return all(part.is_pinned() for part in tensor.parts())


def _zeros_like(
    tensor: RowTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    # Moments and gradients of a weight are ordinary tensors.
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
"""Operations whose result has other rows than their argument."""
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
"""The operations that every RowTensor implements, by operator."""
