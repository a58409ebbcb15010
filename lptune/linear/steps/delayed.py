"""The amax histories behind `float8_delayed`.

A scale is chosen from the largest amax of the last HISTORY steps. Within a step every rank and micro-batch
uses the same scales and measures its own amaxes; at the end of the step the largest of all of them enters the
history. That is one reduction a step for all layers together, however many there are.

    scaling = DelayedScaling(plan, device)
    with scaling.step():
        ... forward and backward of all micro-batches ...

Ranks that gather weights in 8 bits need no amax for it: the history's is the same on all of them. Each
measures its own rows, and the reduction at the end of the step finds the whole weight's.

What runs outside of `step` (an evaluation) quantizes with the same scales and is not measured. A step that a
loop drops as a whole, since something in it was not finite, is taken out again by `undo`. The state is
a few numbers per layer and saved with a checkpoint; a run that resumes from another kind of precision starts
without a history, as a new one does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from lptune.kernels import LIVE, OPERANDS, WEIGHT, LayerAmaxes
from lptune.linear.kind import kind_of
from lptune.linear.plan import Plan
from lptune.linear.weights.weight_amax import max_over_ranks

# Steps remembered. Longer holds on to an outlier longer; torchao's former recipe had 16, TransformerEngine's
# default is 1,024.
HISTORY = 16


class DelayedScaling:
    """Histories of all layers of `plan` that scale with delay; nothing, at no cost, for other kinds."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        all_reduce_max: Callable[[Tensor], None] | None = None,
        gradient_factor: float = 1.0,
    ) -> None:
        """all_reduce_max: takes a tensor's elementwise maximum over all ranks, in place; None: over the
        process group, if there is one. (A rank that went by a history of its own would quantize its rows of a
        weight by another scale than the others read them by.) gradient_factor: by
        which a loop multiplies its loss since FSDP averages gradients, the number of data ranks; the history
        is kept without it, so that a run may go on with another number.
        """
        self._layers = [each for each in plan.converted if each.spec and kind_of(each.spec).has_history]
        self._all_reduce_max = all_reduce_max or _max_over_process_group
        shape = (len(self._layers), len(OPERANDS))
        self._history_LH3 = torch.zeros(shape[0], HISTORY, shape[1], device=device)
        self._before_LH3 = self._history_LH3.clone()
        self._past_L3, self._current_L3 = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        factors = [gradient_factor if operand == "g" else 1.0 for operand in OPERANDS]
        self._factor_3 = torch.tensor(factors, device=device)
        self._is_open = self._has_stepped = False
        self._index: dict[int, int] = {}
        # Of the weights of which layers there is a history: what the host must know at a gather, on all ranks
        # alike; None: not read since the history changed.
        self._has_past: list[bool] | None = None
        for i, layer in enumerate(self._layers):
            assert layer.number is not None
            self._index[layer.number] = i
            state = LIVE.get(layer.number)
            if state is not None:  # the layer of a plan may be gone, and only a copy of its model be left
                # Views: what the kernels write for one layer is here in one tensor for all.
                state.amaxes = LayerAmaxes(self._past_L3[i], self._current_L3[i], self._in_step)
                state.amax_source = self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward passes of one optimizer step, on every rank."""
        if not self._layers:
            yield
            return
        # An evaluation in between left its amaxes. Those of weights are never old: a weight that was gathered
        # then and stayed is not gathered again.
        for operand in range(len(OPERANDS)):
            if operand != WEIGHT:
                self._current_L3[:, operand] = 0
        # Restored or not, the history decides. It is read here, where nothing is under way: at the end of the
        # step the host would wait for backward before it could launch the update.
        self._look_back()
        self._read_past()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        # NaN has no order that every backend agrees on; inf does.
        amaxes = torch.where(self._current_L3.isnan(), torch.inf, self._current_L3)
        self._all_reduce_max(amaxes)
        # A step that is not finite must not spoil the next 16, where a loop goes on after one.
        amaxes = torch.where(amaxes.isinf(), 0.0, amaxes) / self._factor_3
        self._has_stepped = True
        self._before_LH3.copy_(self._history_LH3)
        self._history_LH3.copy_(torch.cat([self._history_LH3[:, 1:], amaxes[:, None]], dim=1))
        self._look_back()

    @property
    def first_step_agrees(self) -> bool:
        """Whether a gather without a history takes a collective: where weights are gathered in 8 bits."""
        return any(layer.spec and layer.spec.gathers_low for layer in self._layers)

    def _in_step(self) -> bool:
        return self._is_open

    def undo(self, skipped: Tensor) -> None:
        """Takes the last step's amaxes out of the histories where `skipped`, a 0-dimensional bool on their
        device, is set. The host does not wait.

        Those that are not finite are not in them anyway; what was huge just before it overflowed is.
        """
        if self._layers:
            self._history_LH3.copy_(torch.where(skipped, self._before_LH3, self._history_LH3))
            self._look_back()

    def loaded(self) -> None:
        """After the histories were filled."""
        if self._layers:
            self._look_back()

    def _look_back(self) -> None:
        self._past_L3.copy_(self._history_LH3.amax(dim=1) * self._factor_3)
        self._has_past = None

    def _read_past(self) -> list[bool]:
        if self._has_past is None:
            has_past_L = self._past_L3[:, WEIGHT] > 0
            gathers_low = self.first_step_agrees
            if not gathers_low or isinstance(has_past_L, FakeTensor):
                # A dry run has no values. As in a run, there is a history after the first step.
                self._has_past = [self._has_stepped or not gathers_low] * len(self._layers)
            else:
                self._has_past = has_past_L.tolist()
        return self._has_past

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """See AmaxSource: the history's, as for a weight that is not sharded; a collective only without one.

        After the gather the original values are gone, so this rank's rows are measured here, and `step`
        merges them with the others'.
        """
        i = self._index[number]
        self._current_L3[i, WEIGHT] = mine_BC.squeeze()
        return (
            self._past_L3[i, WEIGHT].reshape(1, 1) if self._read_past()[i] else max_over_ranks(mine_BC, mesh)
        )

    def weight_changed(self) -> None:
        """Nothing to do: a weight's own amax is none of its scale."""

    def state(self) -> dict[str, Tensor]:
        """For each layer (HISTORY, 3) float32, oldest first, columns as in kernels.OPERANDS.

        The live tensors: to be saved, or filled in place before `loaded`.
        """
        return {f"amax_history/{layer.name}": self._history_LH3[i] for i, layer in enumerate(self._layers)}


def _max_over_process_group(amaxes: Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
