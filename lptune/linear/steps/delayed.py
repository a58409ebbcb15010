"""The amax histories of `float8_delayed`.

A scale is computed from the largest amax of the last HISTORY steps. Within a step, all ranks and all
micro-batches use the same scales, and each measures its own amaxes. At the end of the step, the largest of
them enters the history. This needs one all-reduce per step for all layers together.

    scaling = DelayedScaling(plan, device)
    with scaling.step():
        ... forward and backward of all micro-batches ...

An 8-bit gather of a weight needs no collective for its scale, because all ranks have the same history. Each
rank measures its own rows, and the all-reduce at the end of the step finds the amax of the whole weight.

Passes outside of `step` (an evaluation) use the same scales and are not measured. `undo` removes the amaxes
of a skipped step. The state is a few numbers per layer, and is saved in a checkpoint. A run that resumes from
a checkpoint of another kind starts without a history, like a new run.

A step whose values grow beyond the scales saturates them, and its result can be far off. `num_saturated`
counts the tensors with such values; it goes to the metrics.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from lptune.kernels import LIVE, OPERANDS, WEIGHT, LayerAmaxes
from lptune.linear.plan import LayerPlan, Plan
from lptune.linear.weights.weight_amax import max_over_ranks
from lptune.numerics import FORMATS, nan_as_inf

# Number of steps in a history. In a longer history an outlier counts for longer. torchao's former recipe had
# 16 steps, TransformerEngine's default is 1,024.
HISTORY = 16


class DelayedScaling:
    """The histories of all layers of `plan` whose kind has them; for other kinds empty, at no cost."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        all_reduce_max: Callable[[Tensor], None] | None = None,
        gradient_factor: float = 1.0,
    ) -> None:
        """all_reduce_max: replaces a tensor by its elementwise maximum over all ranks. None: an all-reduce
        over the process group, if there is one. (With different histories, ranks would quantize the rows of a
        weight by different scales.) gradient_factor: the number of data ranks, by which the loop multiplies
        its loss because FSDP averages gradients. Histories are stored without this factor, so that a run can
        resume with another number of ranks.
        """
        self._layers = [each for each in plan.converted if each.spec and each.spec.kind.has_history]
        self._all_reduce_max = all_reduce_max or _max_over_process_group
        shape = (len(self._layers), len(OPERANDS))
        self._history_LH3 = torch.zeros(shape[0], HISTORY, shape[1], device=device)
        self._before_LH3 = self._history_LH3.clone()
        self._past_L3, self._current_L3 = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        factors = [gradient_factor if operand == "g" else 1.0 for operand in OPERANDS]
        self._factor_3 = torch.tensor(factors, device=device)
        self._is_open = self._has_stepped = False
        self._reach_L3 = torch.tensor(
            [list(map(_reach, _formats(each))) for each in self._layers], device=device
        )
        self.num_saturated = torch.zeros((), dtype=torch.int64, device=device) if self._layers else None
        """Number of tensors (x, w or g of a layer) that the last step's scales were too small for: values
        beyond the largest number of the format by more than half its step, on any rank. On the device; None
        for kinds without histories.
        """
        self._index: dict[int, int] = {}
        # For each layer, whether its weight has a history. The host needs this at a gather, equal on all
        # ranks. None: not read since the history changed.
        self._has_past: list[bool] | None = None
        for i, layer in enumerate(self._layers):
            assert layer.number is not None
            self._index[layer.number] = i
            state = LIVE.get(layer.number)
            if state is not None:  # None if the layer was freed, and only a copy of its model exists
                # Views: the kernels write per layer, into one tensor for all layers.
                state.amaxes = LayerAmaxes(self._past_L3[i], self._current_L3[i], self._in_step)
                state.amax_source = self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds the forward and backward passes of one optimizer step, on every rank."""
        if not self._layers:
            yield
            return
        # Remove the amaxes that an evaluation left. Keep those of weights: a weight that has stayed gathered
        # since then is not gathered again, and its amax is still right.
        for operand in range(len(OPERANDS)):
            if operand != WEIGHT:
                self._current_L3[:, operand] = 0
        # Read the history here, while the device is idle. At the end of the step, the host would wait for
        # backward before it could launch the update.
        self._look_back()
        self._read_past()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        amaxes = nan_as_inf(self._current_L3)
        self._all_reduce_max(amaxes)
        # An amax that is not finite would spoil the scales of the next HISTORY steps.
        amaxes = torch.where(amaxes.isinf(), 0.0, amaxes)
        assert self.num_saturated is not None
        is_beyond_L3 = (self._past_L3 > 0) & (amaxes > self._past_L3 * self._reach_L3)
        self.num_saturated.copy_(is_beyond_L3.sum())
        amaxes /= self._factor_3
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
        """Removes the last step's amaxes from the histories if the step was skipped.

        skipped: 0-dimensional bool tensor on the histories' device; the host does not wait for it. Amaxes
        that are not finite never enter a history, but the huge finite ones of an overflowing step do.
        """
        if self._layers:
            self._history_LH3.copy_(torch.where(skipped, self._before_LH3, self._history_LH3))
            self._look_back()

    def measured_no_more(self, number: int) -> None:
        """Call when layer `number` has no low GEMM any more. Otherwise the last amax of its weight would
        enter the history after every further step, but not in a resumed run.
        """
        if number in self._index:
            self._current_L3[self._index[number]] = 0

    def loaded(self) -> None:
        """Call after the tensors of `state` were filled."""
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
                # Tensors of a dry run have no values. As in a run, the first step leaves a history.
                self._has_past = [self._has_stepped or not gathers_low] * len(self._layers)
            else:
                self._has_past = has_past_L.tolist()
        return self._has_past

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """See AmaxSource. Returns the history's amax, as for a weight that is not sharded. If the weight has
        no history yet, returns the maximum over ranks of `mine_BC`, by a collective.

        Records `mine_BC`, because the rows cannot be measured after the gather; `step` merges it with the
        amaxes of the other ranks.
        """
        i = self._index[number]
        self._current_L3[i, WEIGHT] = mine_BC.squeeze()
        return (
            self._past_L3[i, WEIGHT].reshape(1, 1) if self._read_past()[i] else max_over_ranks(mine_BC, mesh)
        )

    def weight_changed(self) -> None:
        """No-op: delayed scales do not depend on the current weight."""

    def state(self) -> dict[str, Tensor]:
        """The live histories by name, for a checkpoint: for each layer (HISTORY, 3) float32, oldest step
        first, one column for each of kernels.OPERANDS. After filling them in place, call `loaded`.
        """
        return {f"amax_history/{layer.name}": self._history_LH3[i] for i, layer in enumerate(self._layers)}


def _formats(layer: LayerPlan) -> tuple[str, str, str]:
    """Of OPERANDS."""
    assert layer.spec is not None
    return layer.spec.fmt, layer.spec.fmt, layer.spec.grad_fmt


def _reach(fmt: str) -> float:
    """The share of the largest number up to which a value is rounded as well as any other."""
    significand, _ = math.frexp(FORMATS[fmt].max)  # in [0.5, 1)
    return 1 + 2.0 ** -((FORMATS[fmt].mantissa_bits or 0) + 2) / significand


def _max_over_process_group(amaxes: Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
