"""What the ops know of layers, by number: their live state, and the GEMMs and gathers that ran.

An op takes tensors and plain values, no module. It knows its layer by a *handle*, a small int64 CPU tensor
with the layer's number. A Python integer would become a constant of the compiled graph and force one
compilation per layer. A tensor is an input: one graph serves all blocks, and each call still tells its layer.
The handle also carries other values that change from call to call and must not be compiled in: the random key
of the step, the number of the micro-batch, and the part of the gradient that a rank has, for stochastic
rounding. A gather that FSDP starts knows the layer by the same number.

LayerState holds what ops and gathers read of a layer, and what they write:

    amaxes            of past steps, and measured in this one   read and written by quantize_delayed
    amax_source       knows the amax of a whole weight          asked by a gather of its shards
    gathered_bytes    number of bytes of the last 8-bit gather  written by it, read by the verification

`linear.convert` enters a layer. The parts of `linear.LowPrecision` set the first two fields. The layer leaves
when it is released or garbage-collected. All other state of a layer is in its module.

The ops themselves count the GEMMs (`note`). An `output` that executes while autograd runs backward is a
recomputation (activation checkpointing, eager or planned by the compiler). It is counted separately, so that
the count of forward passes stays exact.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

GEMMS = ("output", "grad_input", "grad_weight")

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(len(GEMMS))
RECOMPUTED = len(GEMMS)
"""Index in Executed, beside those of GEMMS, for an `output` that ran in backward."""

# (layer number, index into GEMMS or RECOMPUTED) -> executions
Executed = Counter[tuple[int, int]]

# Indices of the values in a handle.
NUMBER, KEY, MICRO_BATCH, PART = range(4)


class LayerAmaxes(NamedTuple):
    """The amaxes of one layer, one for each of delayed.OPERANDS; float32, (3,), on the layer's device."""

    past_3: Tensor  # the largest amax of the remembered steps; 0: no step is remembered
    current_3: Tensor  # x and g: the largest amax since it was last set to 0; w: the amax of its last use
    in_step: Callable[[], bool]  # whether an amax that is measured now enters the history


class AmaxSource(Protocol):
    """An object that knows the amaxes of weights without a collective at each gather."""

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """The amax by which to quantize the weight of layer `number` now: float32 (B, C), the same on all
        ranks of `mesh`.

        mine_BC: the amax of this rank's rows alone, in compute dtype. All ranks call it at the same time.
        """

    def weight_changed(self) -> None:
        """Called on all ranks after something other than the optimizer has written weights."""


@dataclass
class LayerState:
    """The live state of one layer. A field is None if the layer has no such thing."""

    amaxes: LayerAmaxes | None = None
    amax_source: AmaxSource | None = None
    gathered_bytes: int | None = None
    """Number of bytes that the last 8-bit all-gather of the weight brought to this rank. 0: a gather is
    expected, but there was none yet. The gather may be older than the last step: a weight that stayed
    gathered after an evaluation is not gathered again.
    """


class LiveLayers:
    """The states of all converted layers of this process that are alive."""

    def __init__(self) -> None:
        self._states: dict[int, LayerState] = {}
        self._numbers = itertools.count()

    def enter(self) -> int:
        """A new layer number, which no other layer of this process has or had; its state is empty."""
        number = next(self._numbers)
        self._states[number] = LayerState()
        return number

    def leave(self, number: int) -> None:
        """Removes the state of a layer that was released or garbage-collected."""
        self._states.pop(number, None)

    def get(self, number: int) -> LayerState | None:
        """The state of layer `number`; None if no such layer is alive."""
        return self._states.get(number)

    def __getitem__(self, number: int) -> LayerState:
        return self._states[number]

    def __len__(self) -> int:
        return len(self._states)


LIVE = LiveLayers()
"""The registry of this process."""

# The recorders, each under a key of its own: two with the same counts are equal. A recording may end at any
# moment, within `note`, too: the garbage collector ends it when it frees a model that was never trained. So
# nothing iterates over the live dictionary, and each change of it is one operation.
_active: dict[object, Executed] = {}
_num_pauses = 0


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
    """`LayerState.gathered_bytes` of layer `number`; None also if it is no longer alive."""
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
