"""How an optimizer lists its state for a checkpoint.

A checkpoint knows no optimizer. `CheckpointWriter` asks it for what is to be saved, and `load_state` for what
is to be filled (`ListsState` in checkpoint/stored.py):

    stored(names, num_updates)           the live tensors, by their names in the checkpoint
    restored(names, saved, num_updates)  makes the state anew, and lists it to be filled

`ListsMoments` has both for the usual case: tensors of each parameter under fixed keys, and a count of
updates. The count needs no tensor in a file where it is the run's, `num_updates`. A parameter that was frozen
for some of the steps has a smaller one, which is listed: AdamW's bias correction follows from it. An
optimizer derives from the class and says which keys:

    class Momentum(ListsMoments, torch.optim.SGD):
        MOMENTS, COUNT = ("momentum_buffer",), None

    optimizer = Momentum(model.parameters(), lr=cfg.optimizer.lr, momentum=0.9)

`training.Update` skips the update of a step that is not finite. This optimizer cannot skip by itself, so the
host waits for the loss and the gradient norm before it calls step(). An optimizer that can skip says
`SKIPS_BY_FOUND_INF = True`: then `Update` sets its attribute `found_inf`, a 0-dimensional float32 tensor on
the device of the parameters, before each step() and deletes it afterwards, and where it is 1 step() must
change nothing.

State of another dtype or shape than its parameter overrides `new_moment`. It has to be sharded as its
parameter is (distributed.zeros_by_rows makes such a tensor), since a plain one is taken for the same on every
rank. An optimizer that keeps anything else writes the two methods itself.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lptune.linear import is_stored_in_place, plain_rows


class ListsMoments:
    """For an optimizer that keeps `MOMENTS` of every parameter, and counts its updates."""

    MOMENTS: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Keys of the tensors in `state[parameter]`; in a checkpoint `KEY/NAME`."""
    COUNT: ClassVar[str | None] = "step"
    """Key of the number of updates in `state[parameter]`, 0-dimensional and float32; None: there is none.
    In a checkpoint `KEY/NAME`, where the number is not the run's.
    """
    SKIPS_BY_FOUND_INF: ClassVar[bool] = False
    """Whether step() reads `found_inf`. torch's optimizers with fused=True do and need not say it."""

    state: Any
    """As every optimizer of torch has it."""

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> dict[str, Tensor]:
        """The moments of the parameters that have any, and the counts that are not `num_updates`."""
        moments = {
            f"{key}/{name}": self.state[parameter][key]
            for parameter, name in names.items()
            if parameter in self.state
            for key in self.moment_keys(parameter)
        }
        counts = self._counts(names)
        # Read at once: each by itself would make the host wait for the device as many times.
        numbers = torch.stack(list(counts.values())).tolist() if counts else []
        differ = {
            key: count for (key, count), n in zip(counts.items(), numbers, strict=True) if n != num_updates
        }
        return moments | differ

    def _counts(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The counts of all parameters that have one, by their names in a checkpoint."""
        return {
            f"{self.COUNT}/{name}": self.state[parameter][self.COUNT]
            for parameter, name in names.items()
            if parameter in self.state and self.COUNT in self.state[parameter]
        }

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> dict[str, Tensor]:
        """New moments of the parameters that had any, and the counts that the checkpoint holds."""
        for parameter, name in names.items():
            # A parameter that was never updated (a frozen one) has no state.
            if any(f"{key}/{name}" in saved for key in (*self.moment_keys(parameter), self.COUNT)):
                self.state[parameter] = self._counted(parameter, num_updates) | {
                    key: self.new_moment(parameter, key) for key in self.moment_keys(parameter)
                }
        counts = self._counts(names)
        return self.stored(names, num_updates) | {key: counts[key] for key in counts.keys() & set(saved)}

    def _counted(self, parameter: nn.Parameter, num_updates: int) -> dict[str, Tensor]:
        """State with the count alone."""
        if self.COUNT is None:
            return {}
        return {self.COUNT: torch.tensor(float(num_updates), dtype=torch.float32, device=parameter.device)}

    def moment_keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The keys of the parameter's moments; several where a moment is stored in several tensors."""
        return self.MOMENTS

    def new_moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        """Storage to be filled: of the parameter's shape, dtype and sharding."""
        # Every element will be read, or loading fails: filling it first would be a second pass over new
        # memory.
        if is_stored_in_place(parameter):
            return torch.empty_like(plain_rows(parameter.detach()))
        return torch.zeros_like(parameter)
