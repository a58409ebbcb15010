"""x in 8 bits, made once for the layers that read one x: q, k and v; gate and up.

Each layer quantizes its x in forward, for `output`, and mostly again in backward, for `grad_weight`. Layers
that read one x would all compute the same 8-bit values. A compiled block computes them once, because the
compiler merges calls of an op with equal arguments. Eager layers share an InputGroup, which `convert` makes:

    forward     The first layer of the group that gets an x quantizes it. The others use the result, and the
                last of them drops it.
    backward    The same, among the layers that got that x. Backward quantizes x again: nothing in 8 bits is
                kept after forward, and activation checkpointing may have computed x again.

A group is only an expectation: that its layers are called with one x, one after another. A layer that gets
another x (a hook replaced it, another attends to the encoder) quantizes it, as one without a group does. "The
same x" means the same tensor object with an equal version counter, which torch increments with each write.
Writes by collectives (a buffer that `broadcast` or `recv` fills), by NumPy and through `.data` are not
counted. So a layer that is called again begins anew: a buffer that is filled between two calls of the readers
is quantized again. If a layer of the group is not called, the 8-bit values of x are freed with x, and in
backward when the backward pass ends.

Autograd's graph stays the same. Each layer has its own node, which saves x and returns its own gradient.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

READ_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
"""Names of sibling modules that usually read one x: in Hugging Face's decoders, and in BERT's family."""


class Once(Protocol):
    """Returns `make()`, or what it returned for another layer that shares x. Kinds call it at most once in
    forward and once in backward; the result must depend on x and the spec only.
    """

    def __call__(self, make: Callable[[], R]) -> R: ...


def alone(make: Callable[[], R]) -> R:
    """The Once of a layer that shares nothing."""
    return make()


class OnceForward:
    """Keeps a result until `forget`, which InputGroup calls when x is freed. The object itself is freed after
    its last reader.
    """

    def __init__(self) -> None:
        self._made: Any = None

    def __call__(self, make: Callable[[], R]) -> R:
        made: R | None = self._made
        if made is None:
            made = self._made = make()
        return made

    def forget(self, *_: Any) -> None:
        """Drops the result; the next call makes it again."""
        self._made = None


class OnceBackward(OnceForward):
    """Drops the result after as many calls as there are `readers`, or when the backward pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = 0
        """Nodes of the autograd graph that may call this in a backward pass."""
        self._left = 0

    def __call__(self, make: Callable[[], R]) -> R:
        # Compiled autograd traces backward, merges equal calls itself, and has no callbacks.
        if self.readers == 1 or torch.compiler.is_compiling():
            return make()
        if self._made is None:
            self._left = self.readers
            # A pass for some gradients does not run all readers.
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        made = super().__call__(make)
        self._left -= 1
        if self._left <= 0:
            self.forget()
        return made


class SharedInput(NamedTuple):
    """What the readers of one x share."""

    forward: OnceForward
    backward: OnceBackward


class _Reading(NamedTuple):
    """An x that some readers of a group are still to read."""

    x: Callable[[], Tensor | None]  # a weak reference
    key: tuple[Any, ...]
    shared: SharedInput
    readers: frozenset[int]  # the numbers of those that have read it


class InputGroup:
    """Layers that are expected to read one x, one after another."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._reading: _Reading | None = None

    def read(self, reader: int, x: Tensor, *settings: Any) -> SharedInput | None:
        """What a layer shares with those that read the same `x` with equal settings. Each layer calls it
        once in a forward. None in inference mode, in which x may change unnoticed, and what is made there
        serves no training.

        reader: the layer's number.
        """
        if x.is_inference() or torch.is_inference_mode_enabled():
            return None
        # Work on another stream does not wait for what this stream quantizes.
        on_gpu = x.is_cuda and torch.cuda.is_initialized()
        key = (x._version, torch.cuda.current_stream(x.device) if on_gpu else None, *settings)
        # The state is replaced as a whole, so threads that run one model at most fail to share.
        reading = self._reading
        if reading is None or reader in reading.readers or reading.x() is not x or reading.key != key:
            shared = SharedInput(OnceForward(), OnceBackward())
            reading = _Reading(weakref.ref(x, shared.forward.forget), key, shared, frozenset())
        readers = reading.readers | {reader}
        self._reading = reading._replace(readers=readers) if len(readers) < self._num_readers else None
        return reading.shared

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have activations of their own."""
        return vars(self) | {"_reading": None}
