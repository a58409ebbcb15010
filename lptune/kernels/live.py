"""What is live of each low-precision layer while it trains: one registry, by the layer's number.

An op is opaque to torch.compile and takes nothing but tensors and plain values. It knows its layer by the
number in the layer's handle (record.py), and a gather that FSDP starts knows it by the same number. What they
need of the layer beyond that, and what they find out, is in its LayerState:

    amaxes            of past steps, and measured in this one   read and written by quantize_delayed
    amax_source       knows the amax of a whole weight          asked by a gather of its shards
    gathered_bytes    what the last 8-bit gather brought        written by it, read by the verification

`linear.convert` enters a layer, the parts of `linear.LowPrecision` fill in the first two, and the layer
leaves when it is released or dies. Nothing else of a layer is kept outside of its module.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class LayerAmaxes(NamedTuple):
    """Of one layer, a number for each of delayed.OPERANDS; float32, (3,), on the layer's device."""

    past_3: Tensor  # largest amax of the steps remembered; 0: none
    current_3: Tensor  # of x and g the largest amax since it was last set to 0; of w that of its last use
    in_step: Callable[[], bool]  # whether what is measured now enters the history


class AmaxSource(Protocol):
    """What knows the amaxes of some weights without a collective at each gather."""

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """By which the weight of layer `number` is quantized now, float32 (B, C), the same on all ranks of
        `mesh`.

        mine_BC: of this rank's rows alone, in compute dtype. All ranks ask at the same time.
        """

    def weight_changed(self) -> None:
        """Weights are no longer what they were, on all ranks."""


@dataclass
class LayerState:
    """Of one layer; None: there is none."""

    amaxes: LayerAmaxes | None = None
    amax_source: AmaxSource | None = None
    gathered_bytes: int | None = None
    """0: an 8-bit gather is expected, and there was none yet. Not the last step's: a weight that stayed
    gathered after an evaluation is not gathered again.
    """


class LiveLayers:
    """The states of all converted layers of this process that are alive."""

    def __init__(self) -> None:
        self._states: dict[int, LayerState] = {}
        self._numbers = itertools.count()

    def enter(self) -> int:
        """A number that no other layer of this process has or had, with an empty state."""
        number = next(self._numbers)
        self._states[number] = LayerState()
        return number

    def leave(self, number: int) -> None:
        """When a layer is released, or gone."""
        self._states.pop(number, None)

    def get(self, number: int) -> LayerState | None:
        """None: no such layer is alive."""
        return self._states.get(number)

    def __getitem__(self, number: int) -> LayerState:
        return self._states[number]

    def __len__(self) -> int:
        return len(self._states)


LIVE = LiveLayers()
"""The one of this process."""
