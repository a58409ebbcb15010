"""The live state of the low-precision layers: one registry, by layer number.

An op takes tensors and plain values, no module. It knows its layer by the number in the layer's handle
(record.py). A gather that FSDP starts knows the layer by the same number. LayerState holds what ops and
gathers read of a layer, and what they write:

    amaxes            of past steps, and measured in this one   read and written by quantize_delayed
    amax_source       knows the amax of a whole weight          asked by a gather of its shards
    gathered_bytes    number of bytes of the last 8-bit gather  written by it, read by the verification

`linear.convert` enters a layer. The parts of `linear.LowPrecision` set the first two fields. The layer leaves
when it is released or garbage-collected. All other state of a layer is in its module.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


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
    """Number of bytes of the last 8-bit gather. 0: a gather is expected, but there was none yet. The gather
    may be older than the last step: a weight that stayed gathered after an evaluation is not gathered again.
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
