"""Counts of the low-precision GEMMs and gathers that ran, per layer.

The count comes from inside the kernels. A layer is known there by its *handle*, a small int64 CPU tensor: a
Python integer would be burnt into the compiled graph and force one compilation per layer, while a tensor is
an input, so that one graph serves all blocks and each call still says whose it is. What else differs from
call to call and must not be compiled in travels the same way: the random key of the step, the number of
the micro-batch and the part of the gradient that a rank has, for stochastic rounding.

An `output` that executes while autograd runs backward is a recomputation (activation checkpointing, eager or
planned by the compiler) and is counted apart: forward's own count is then exact, whatever is recomputed.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GEMMS = ("output", "grad_input", "grad_weight")

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(len(GEMMS))
RECOMPUTED = len(GEMMS)
"""Stands for an `output` that ran in backward, where Executed holds indices into GEMMS."""

# (layer handle's value, index into GEMMS or RECOMPUTED) -> executions
Executed = Counter[tuple[int, int]]

_active: list[Executed] = []


# What stands where in a handle.
NUMBER, KEY, MICRO_BATCH, PART = range(4)


def layer_handle(number: int) -> Tensor:
    """The tensor that names layer `number` inside a kernel; -1 stands for no layer. Its key is 0: not set."""
    return torch.tensor([number, 0, 0, 0], dtype=torch.int64, device="cpu")


def handle_of_part(layer: Tensor, part: int) -> Tensor:
    """`layer` as a new handle, on a rank whose gradient is part number `part` of the layer's."""
    return torch.cat([layer[:PART], layer.new_full((1,), part)])


@contextmanager
def record_gemms() -> Iterator[Executed]:
    """Counts every low-precision GEMM that executes within the block, forward and backward."""
    executed: Executed = Counter()
    _active.append(executed)
    try:
        yield executed
    finally:
        # By identity: two recorders that have counted the same are equal.
        _active[:] = [other for other in _active if other is not executed]


_gathered_bytes: dict[int, int] = {}  # 0: expected, and not there yet


def expect_gather(number: int) -> None:
    """From now on the weight of layer `number` is to be gathered in 8 bits."""
    _gathered_bytes.setdefault(number, 0)


def forget_gather(number: int) -> None:
    """When a layer is released, or gone."""
    _gathered_bytes.pop(number, None)


def note_gather(number: int, num_bytes: int) -> None:
    """Called when the weight of layer `number` has arrived from an 8-bit all-gather of so many bytes."""
    _gathered_bytes[number] = num_bytes


def gathered_bytes(number: int) -> int | None:
    """What the last 8-bit all-gather of the layer's weight brought to this rank.

    0: one is expected, and there was none; None: none is expected.

    Not the last step's: a weight that stayed gathered after an evaluation is not gathered again.
    """
    return _gathered_bytes.get(number)


def note(layer: Tensor, gemm: int) -> None:
    """Called by a kernel after it ran. Backward runs on autograd's threads, hence no thread-local state."""
    if gemm == 0 and torch._C._current_graph_task_id() != -1:  # -1: this thread is in no backward
        gemm = RECOMPUTED
    for executed in _active:
        executed[int(layer[NUMBER]), gemm] += 1
