"""The end of a step: clip, update, look. A step that is not finite updates nothing, on any rank.

One NaN in an update is in every weight, and nothing that is trained or saved afterwards is worth anything. So
where the loss or the gradient norm is not finite, on whichever rank, weights, moments, their count of updates
and the amax histories stay as they were, bit for bit, and the run goes on with the next rows. So many steps
of that in a row are no accident, and end it.

Who decides? A host that looks before it updates waits for the whole of backward, and then the device waits
for the host to launch the update. Here the device decides:

    totals  = [losses, squares of gradients]     of this rank; summed over all in one all-reduce, which hands
                                                 anybody's NaN or inf to everybody
    skipped = loss or norm is not finite         0-dimensional, on the device
    AdamW   with found_inf = skipped             launched in any case; its kernel returns where that is 1
    host    <- [loss, norm]                      the step's one wait, when all is launched

`found_inf` is how torch.amp.GradScaler tells a fused optimizer of overflows: the kernel leaves weights and
moments, and what was added to `step` is subtracted again. It holds for DTensors as for plain tensors.
Clipping by a norm that is not finite makes NaN of all gradients; they are dropped.

The learning rate and the data go by the number of the step, skipped or not.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lptune.config import DivergedError
from lptune.distributed import World
from lptune.linear import LowPrecision
from lptune.training.int8_adamw import Int8AdamW
from lptune.training.optimizer import grad_squares, scale_gradients


class Updated(NamedTuple):
    """What a step came to; of a step that was skipped, one of the two is not finite."""

    loss: float
    """Mean over the targets of all ranks."""
    grad_norm: float
    """Global, before clipping."""

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class Update:
    """Clips and updates after each step's backward, and counts the steps in which it could not."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        max_grad_norm: float,
        low: LowPrecision | None = None,
        saved: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """low: whose amax histories a skipped step must not enter. saved: `counts()` of the run that is
        continued. Raises ValueError for an optimizer that would step all the same.
        """
        if not (isinstance(optimizer, Int8AdamW) or getattr(optimizer, "_step_supports_amp_scaling", False)):
            raise ValueError(
                f"{type(optimizer).__name__} does not know found_inf, and would write NaN into all weights "
                "where a step is not finite; use one of torch's with fused=True"
            )
        self._model, self._optimizer, self._world = model, optimizer, world
        self._max_grad_norm, self._low = max_grad_norm, low
        self.num_skipped: int = saved.get("num_skipped", 0)
        """Steps without an update since the run began."""
        self.num_skipped_in_a_row: int = saved.get("num_skipped_in_a_row", 0)
        """Those of them after the last update."""
        self._last = Updated(0.0, 0.0)

    def counts(self) -> dict[str, int]:
        """To be saved with a checkpoint."""
        return {"num_skipped": self.num_skipped, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def __call__(self, loss_sum: Tensor, num_targets: float) -> Updated:
        """The update, and gradients set to None. A collective.

        loss_sum: of this rank's micro-batches, on the device; num_targets: of all ranks.
        """
        self._last = Updated(*self.launch(loss_sum, num_targets).tolist())
        if not self._last.skipped:
            self.num_skipped_in_a_row = 0
            return self._last
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if isinstance(self._optimizer, Int8AdamW):
            self._optimizer.take_back()
        return self._last

    @torch.no_grad()
    def launch(self, loss_sum: Tensor, num_targets: float) -> Tensor:
        """The part for which the host does not wait: all that the device does, and every collective.

        Returns the loss and the gradient norm, float64 of shape (2,), on the device.
        """
        world, model, optimizer = self._world, self._model, self._optimizer
        # Tensor-parallel ranks hold the same loss: the first one's counts.
        mine = loss_sum if world.rank % world.tensor_size == 0 else torch.zeros_like(loss_sum)
        squares = grad_squares(model).to(world.device)
        totals = torch.stack([mine.detach().to(torch.float64), squares])
        world.sum_(totals)
        loss, norm = totals[0] / num_targets, totals[1].sqrt().to(torch.float32)
        skipped = ~(loss.isfinite() & norm.isfinite())

        scale_gradients(model, self._max_grad_norm, norm)
        # Where parameters are offloaded they are updated on the host, which has to wait for this.
        parameters_on = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = skipped.to(torch.float32).to(parameters_on)  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        if self._low is not None:
            self._low.undo(skipped)

        return torch.stack([loss, norm.to(torch.float64)])

    def diverged(self, step: int, newest_checkpoint: Path | None, output_dir: Path) -> DivergedError:
        """What ends the run after step number `step` (1 is the first), which was skipped.

        output_dir: the run's folder. The remedy names it, since a config's may change with precision.kind.
        """
        loss, grad_norm = self._last
        count = self.num_skipped_in_a_row
        newest, earlier = "there is no checkpoint", ""
        if newest_checkpoint is not None:
            newest = f"the newest checkpoint is {newest_checkpoint}"
            earlier = "; where that does not help, resume=… an earlier checkpoint"
        return DivergedError(
            f"diverged at step {step}: loss {loss:.4g}, gradient norm {grad_norm:.4g}, not finite"
            + (f" for {count} steps in a row" if count > 1 else "")
            + f"; the weights are still those of step {step - count}, and {newest}. The same config would "
            "end here again: lower optimizer.lr, or set compute_dtype=float32, or precision.kind=none and "
            f"output_dir={output_dir} (this run's)"
            f"{earlier}"
        )
