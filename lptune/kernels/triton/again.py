"""Launches that are made again: what the host computes for a launch, computed once for each shape.

A launch through Triton costs the host 20 to 50 microseconds, about as long as a short kernel runs: Triton
derives the compiled kernel from the type, the alignment and the divisibility of each argument, and lptune
derives the configuration from sizes. All of this depends on plain values, such as sizes, strides and dtypes.
So an op forms a key of them, a tuple, and looks up what the first launch with this key has found:

    key -> compiled kernels, grids, numbers, and what a TMA descriptor says beside the address

A call adds its tensors. Triton also looks at their addresses: a kernel for addresses that are multiples of 16
is another kernel than one for any address. torch allocates such addresses, but a view may begin anywhere. So
which of the tensors are aligned belongs to the key.

A call may also add numbers that are new in each step, such as the key of random bits: `varying`. Their kernel
must not be specialized for them (`do_not_specialize`). Then it depends on their integer type alone.

Under CUDA graph capture nothing is remembered, because the configuration may not be the measured one. A
changed LPTUNE_AUTOTUNE does not change what is remembered.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lptune.kernels.triton import launch

MAX_REMEMBERED = 4096
"""Number of keys. A run has some tens of them, or some more for each number of tokens that comes up."""

_ALIGNMENT = 16


Describe = Callable[[Tensor], Any]
"""Makes the TMA's descriptor of a tensor, a dataclass with the tensor as its `base`."""


def tile(shape: list[int]) -> Describe:
    """Describes a tensor that is loaded in tiles of `shape`."""
    return functools.partial(TensorDescriptor.from_tensor, block_shape=shape)


class Launch(NamedTuple):
    """One launch of a kernel whose parameters are tensors, varying numbers, numbers, then constants.

    described: with the TMA, for each of the first tensors.
    """

    kernel: Any
    grid: tuple[int, ...]
    num_tensors: int  # takes so many of a call's tensors, from the first
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int | None = None  # None: Triton's default
    described: tuple[Describe, ...] = ()
    num_varying: int = 0  # takes so many of a call's varying numbers, from the first

    def run(self, tensors: Sequence[Tensor | None], varying: tuple[int, ...] = ()) -> Any:
        """Launches. Returns Triton's compiled kernel; None in the interpreter."""
        mine: list[Any] = list(tensors[: self.num_tensors])
        for index, describe in enumerate(self.described):
            mine[index] = describe(mine[index])
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        # enable_fp_fusion: each product is rounded by itself, as in the reference.
        return self.kernel[self.grid](
            *mine,
            *varying[: self.num_varying],
            *self.numbers,
            **self.constants,
            num_warps=self.num_warps,
            **stages,
            enable_fp_fusion=False,
        )


def again(key: Hashable, tensors: Sequence[Tensor | None], varying: tuple[int, ...] = ()) -> bool:
    """Repeats the launches of `key` with these tensors and numbers. False: none are remembered."""
    found = _remembered.get(_whole_key(key, tensors, varying))
    if found is None:
        return False
    for each in found:
        each(tensors, varying)
    return True


def first(
    key: Hashable,
    launches: Sequence[Launch],
    tensors: Sequence[Tensor | None],
    varying: tuple[int, ...] = (),
) -> None:
    """Makes the launches, one after the other, and remembers them for `again`.

    key: decides all fields of `launches`, the device, and the dtypes, shapes and strides of `tensors`.
    """
    compiled = [each.run(tensors, varying) for each in launches]
    if None in compiled or launch.capturing():
        return
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    steps = zip(launches, compiled, strict=True)
    found = [_repeatable(each, kernel, tensors) for each, kernel in steps]
    _remembered[_whole_key(key, tensors, varying)] = found


def forget() -> None:
    """Forgets all launches, for tests."""
    _remembered.clear()


def _repeatable(made: Launch, compiled: Any, tensors: Sequence[Tensor | None]) -> "_Again":
    grid = (*made.grid, 1, 1)[:3]
    num_tensors, num_varying = made.num_tensors, made.num_varying
    names = made.kernel.arg_names[num_tensors + num_varying + len(made.numbers) :]
    # All parameters in order, constants too: Triton has this call in its tutorial on the fused softmax.
    start, rest = compiled[grid], (*made.numbers, *(made.constants[name] for name in names))
    described: list[tuple[Any, dict[str, Any]]] = []
    for tensor, describe in zip(tensors, made.described, strict=False):
        assert tensor is not None
        one = describe(tensor)
        described.append((type(one), vars(one) | {"base": None}))
    num_described = len(described)

    def without_descriptors(tensors: Sequence[Tensor | None], varying: tuple[int, ...]) -> None:
        start(*tensors[:num_tensors], *varying[:num_varying], *rest)

    def with_descriptors(tensors: Sequence[Tensor | None], varying: tuple[int, ...]) -> None:
        # New objects for each launch: two threads may launch at once. Their fields are known to be legal.
        descriptors = []
        for base, (cls, fields) in zip(tensors, described, strict=False):
            descriptor = cls.__new__(cls)
            vars(descriptor).update(fields, base=base)
            descriptors.append(descriptor)
        start(*descriptors, *tensors[num_described:num_tensors], *varying[:num_varying], *rest)

    return with_descriptors if described else without_descriptors


def _whole_key(key: Hashable, tensors: Sequence[Tensor | None], varying: tuple[int, ...]) -> Hashable:
    """`key` and what else decides the compiled kernels: integer types, and which addresses are aligned."""
    addresses = 0
    for each in tensors:
        if each is not None:
            addresses |= each.data_ptr()
    if varying:
        key = (key, *map(_integer_type, varying))
    if addresses % _ALIGNMENT:
        aligned = (each is None or each.data_ptr() % _ALIGNMENT == 0 for each in tensors)
        key = (key, "aligned", *aligned)
    return key


def _integer_type(number: int) -> str:
    """As Triton chooses it."""
    if -(2**31) <= number < 2**31:
        return "int32"
    return "int64" if number < 2**63 else "uint64"


_Again = Callable[[Sequence[Tensor | None], tuple[int, ...]], None]
_remembered: dict[Hashable, list[_Again]] = {}
