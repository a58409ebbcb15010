"""Counts of the low-precision GEMMs and gathers that ran, per layer.

The ops themselves count. Inside an op, a layer is identified by its *handle*, a small int64 CPU tensor. A
Python integer would become a constant of the compiled graph and force one compilation per layer. A tensor is
an input: one graph serves all blocks, and each call still tells its layer. The handle also carries other
values that change from call to call and must not be compiled in: the random key of the step, the number of
the micro-batch, and the part of the gradient that a rank has, for stochastic rounding.

An `output` that executes while autograd runs backward is a recomputation (activation checkpointing, eager or
planned by the compiler). It is counted separately, so that the count of forward passes stays exact.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lptune.kernels.live import LIVE

GEMMS = ("output", "grad_input", "grad_weight")

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(len(GEMMS))
RECOMPUTED = len(GEMMS)
"""Index in Executed, beside those of GEMMS, for an `output` that ran in backward."""

# (layer handle's value, index into GEMMS or RECOMPUTED) -> executions
Executed = Counter[tuple[int, int]]

# The recorders, each under a key of its own: two with the same counts are equal. A recording may end at any
# moment, within `note`, too: the garbage collector ends it when it frees a model that was never trained. So
# nothing iterates over the live dictionary, and each change of it is one operation.
_active: dict[object, Executed] = {}
_num_pauses = 0


# Indices of the values in a handle.
NUMBER, KEY, MICRO_BATCH, PART = range(4)


def layer_handle(number: int) -> Tensor:
    """The tensor that identifies layer `number` inside an op; -1: no layer. Its random key is 0: not set."""
    return torch.tensor([number, 0, 0, 0], dtype=torch.int64, device="cpu")


def handle_of_part(layer: Tensor, part: int) -> Tensor:
    """A copy of the handle `layer` for a rank that has part number `part` of the gradient."""
    return torch.cat([layer[:PART], layer.new_full((1,), part)])


@contextmanager
def record_gemms() -> Iterator[Executed]:
    """Counts every low-precision GEMM that executes within the block, in forward and backward."""
    executed: Executed = Counter()
    key = object()
    _active[key] = executed
    try:
        yield executed
    finally:
        del _active[key]


@contextmanager
def not_recorded() -> Iterator[None]:
    """Within the block no GEMM is counted, for passes that are not part of the training."""
    global _num_pauses
    _num_pauses += 1
    try:
        yield
    finally:
        _num_pauses -= 1


def expect_gather(number: int) -> None:
    """Registers that the weight of layer `number` should be gathered in 8 bits from now on."""
    if LIVE[number].gathered_bytes is None:
        LIVE[number].gathered_bytes = 0


def note_gather(number: int, num_bytes: int) -> None:
    """Notes that an 8-bit all-gather of `num_bytes` has brought the weight of layer `number`."""
    state = LIVE.get(number)
    if state is not None:
        state.gathered_bytes = num_bytes


def gathered_bytes(number: int) -> int | None:
    """Number of bytes that the last 8-bit all-gather of the layer's weight brought to this rank.

    0: a gather is expected, but there was none; None: none is expected. The gather may be older than the last
    step: a weight that stays gathered after an evaluation is not gathered again.
    """
    state = LIVE.get(number)
    return None if state is None else state.gathered_bytes


def note(layer: Tensor, gemm: int) -> None:
    """Counts one GEMM of `layer`; called inside the op. gemm: index into GEMMS.

    The counters are global, not per thread: backward runs on threads of autograd.
    """
    if gemm == 0 and torch._C._current_graph_task_id() != -1:  # -1: this thread is not in a backward
        gemm = RECOMPUTED
    if _num_pauses:
        return
    for executed in list(_active.values()):
        executed[int(layer[NUMBER]), gemm] += 1
