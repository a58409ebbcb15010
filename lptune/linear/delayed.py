"""The amax histories behind `float8_delayed`.

A scale is chosen from the largest amax of the last HISTORY steps. Within a step every rank and micro-batch
uses the same scales and measures its own amaxes; at the end of the step the largest of all of them enters the
history. That is one reduction a step for all layers together, however many there are.

    scaling = DelayedScaling(plan, device)
    with scaling.step():
        ... forward and backward of all micro-batches ...

What runs outside of `step` (an evaluation) quantizes with the same scales and is not measured. The state is
a few numbers per layer and saved with a checkpoint; a run that resumes from another kind of precision starts
without a history, as a new one does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lptune.kernels import OPERANDS, LayerAmaxes, set_layer_amaxes
from lptune.linear.plan import Plan

# Steps remembered. Longer holds on to an outlier longer; torchao's former recipe had 16, TransformerEngine's
# default is 1,024.
HISTORY = 16


class DelayedScaling:
    """Histories of all layers of `plan` that scale with delay; nothing, at no cost, for other kinds."""

    def __init__(
        self, plan: Plan, device: torch.device, all_reduce_max: Callable[[Tensor], None] | None = None
    ) -> None:
        """all_reduce_max: takes a tensor's elementwise maximum over all ranks, in place."""
        self._layers = [layer for layer in plan.converted if layer.spec and layer.spec.scaling == "delayed"]
        self._all_reduce_max = all_reduce_max
        shape = (len(self._layers), len(OPERANDS))
        self._history_LH3 = torch.zeros(shape[0], HISTORY, shape[1], device=device)
        self._past_L3, self._current_L3 = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        for i, layer in enumerate(self._layers):
            assert layer.number is not None
            # Views: what the kernels write for one layer is here in one tensor for all.
            set_layer_amaxes(layer.number, LayerAmaxes(self._past_L3[i], self._current_L3[i]))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward passes of one optimizer step, on every rank."""
        if not self._layers:
            yield
            return
        # An evaluation in between left its amaxes.
        self._current_L3.zero_()
        # Restored or not, the history decides.
        self._past_L3.copy_(self._history_LH3.amax(dim=1))
        yield
        # NaN has no order that every backend agrees on; inf does.
        amaxes = torch.where(self._current_L3.isnan(), torch.inf, self._current_L3)
        if self._all_reduce_max is not None:
            self._all_reduce_max(amaxes)
        # A step that is not finite must not spoil the next 16, where a loop goes on after one.
        amaxes = torch.where(amaxes.isinf(), 0.0, amaxes)
        self._history_LH3.copy_(torch.cat([self._history_LH3[:, 1:], amaxes[:, None]], dim=1))
        self._past_L3.copy_(self._history_LH3.amax(dim=1))

    def state(self) -> dict[str, Tensor]:
        """For each layer (HISTORY, 3) float32, oldest first, columns as in kernels.OPERANDS.

        The live tensors: to be saved, or filled in place before the next step.
        """
        return {f"amax_history/{layer.name}": self._history_LH3[i] for i, layer in enumerate(self._layers)}
