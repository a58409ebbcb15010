"""The end of a step: clip and update. A step that is not finite updates nothing, on any rank.

One NaN in an update spreads to every weight, and makes all later training and checkpoints worthless. So if
the loss or the gradient norm is not finite on any rank, weights, moments, the count of updates and the amax
histories keep every bit, and the run goes on with the next rows. Several such steps in a row are not an
accident: they end the run.

If the host decided, it would wait for the end of backward to look at the loss, and then the device would wait
for the host to launch the update. So the device decides:

    totals  = [losses, squares of gradients]     of this rank; summed over ranks in one all-reduce, which
                                                 spreads a NaN or inf to all ranks
    skipped = loss or norm is not finite         0-dimensional, on the device
    AdamW   with found_inf = skipped             always launched; its kernel returns if found_inf is 1
    host    <- [loss, norm]                      the only wait of the step, for these two alone: the device
                                                 goes on with the update while the host prepares a step

torch.amp.GradScaler uses `found_inf` to report an overflow to a fused optimizer: the kernel then changes
neither weights nor moments, and the increment of `step` is undone. It works for DTensors and plain tensors.
Clipping by a norm that is not finite makes all gradients NaN; they are dropped.

For an optimizer that does not read `found_inf` the host decides: it waits for `skipped`, and does not call
step() where that is set. This costs a second wait in each step; a line says so.

The learning rate and the data depend on the number of the step, skipped or not.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lptune.base.errors import DivergedError
from lptune.distributed import World, on_this_rank, reshard
from lptune.linear import LowPrecision
from lptune.training.adamw import MomentsOfAdamW
from lptune.training.chunked_adamw import ChunkedAdamW
from lptune.training.optimizer import grad_squares, scale_gradients


class Updated(NamedTuple):
    """Loss and gradient norm of a step. If the step was skipped, one of the two is not finite."""

    loss: float
    """Mean loss over the targets of all ranks."""
    grad_norm: float
    """Global gradient norm, before clipping."""

    @property
    def skipped(self) -> bool:
        """Whether the step updated nothing."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class Update:
    """Clips and updates after the backward of each step, and counts skipped steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        max_grad_norm: float,
        low: LowPrecision | None = None,
    ) -> None:
        """low: a skipped step is removed from its amax histories."""
        self._skips_on_device = skips_by_found_inf(optimizer)
        if not self._skips_on_device:
            world.print(
                f"{type(optimizer).__name__} does not read found_inf, so each update waits until the loss "
                "and the gradient norm are known"
            )
        self._model, self._optimizer, self._world = model, optimizer, world
        self._max_grad_norm, self._low = max_grad_norm, low
        self.num_skipped = 0
        """Number of skipped steps since the run began."""
        self.num_skipped_in_a_row = 0
        """Number of skipped steps since the last update."""
        self._last = Updated(0.0, 0.0)

    def counts(self) -> dict[str, float]:
        """The counts of skipped steps, for a checkpoint."""
        return {"num_skipped": self.num_skipped, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def restore(self, saved: Mapping[str, float]) -> None:
        """Goes on from the `counts` of a checkpoint."""
        self.num_skipped = int(saved["num_skipped"])
        self.num_skipped_in_a_row = int(saved["num_skipped_in_a_row"])

    def __call__(self, loss_sum: Tensor, num_targets: float) -> Updated:
        """Updates the weights and sets gradients to None. A collective.

        loss_sum: over the micro-batches of this rank, on the device. num_targets: over all ranks.
        """
        read = self.launch(loss_sum, num_targets)
        self._last = Updated(*read())
        if not self._last.skipped:
            self.num_skipped_in_a_row = 0
            return self._last
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if isinstance(self._optimizer, ChunkedAdamW):
            self._optimizer.take_back()
        return self._last

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of each micro-batch before its backward, for an update that happens within."""

    @torch.no_grad()
    def launch(self, loss_sum: Tensor, num_targets: float) -> Callable[[], list[float]]:
        """All work of the device, and all collectives. The host waits only if the optimizer does not read
        `found_inf`.

        Returns a function that waits for the loss and the gradient norm, not for the update, and returns
        these two.
        """
        world = self._world
        reshard(self._model)  # a forward after backward, for a metric, may have left other weights in it
        # Ranks that read the same rows hold the same loss: only that of the first counts.
        mine = loss_sum if world.rank % world.ranks_per_row == 0 else torch.zeros_like(loss_sum)
        totals = torch.stack([mine.detach().to(torch.float64), self._squares().to(world.device)])
        world.sum_(totals)
        loss, norm = totals[0] / num_targets, totals[1].sqrt().to(torch.float32)
        skipped = ~(loss.isfinite() & norm.isfinite())
        read = _copied_to_host(torch.stack([loss, norm.to(torch.float64)]))

        self._apply(norm, skipped)
        self._optimizer.zero_grad(set_to_none=True)
        if self._low is not None:
            self._low.undo(skipped)
        return read

    def _squares(self) -> Tensor:
        """This rank's share of the squared global gradient norm: 0-dimensional, float64."""
        return grad_squares(self._model)

    def _apply(self, norm: Tensor, skipped: Tensor) -> None:
        """Clips by the global gradient norm `norm` and launches the update, which changes nothing where
        `skipped` is set.
        """
        scale_gradients(self._model, self._max_grad_norm, norm)
        if self._skips_on_device:
            with_gradient = [p for p in self._model.parameters() if p.grad is not None]
            self._step_unless(skipped, with_gradient, self._optimizer.step)
        # In a dry run `skipped` is fake and has no value; its step is not skipped.
        elif isinstance(skipped, FakeTensor) or not skipped.item():
            self._optimizer.step()

    def _step_unless(
        self, skipped: Tensor, parameters: Iterable[nn.Parameter], step: Callable[[], object]
    ) -> None:
        """Launches `step`, which updates `parameters`; it changes nothing where `skipped` is set."""
        optimizer = self._optimizer
        first = optimizer.param_groups[0]["params"][0]
        # Some offloaded parameters are updated on the host, which must wait for this value.
        updates_on = optimizer.device_of(first) if isinstance(optimizer, ChunkedAdamW) else first.device
        found_inf = skipped.to(torch.float32).to(updates_on)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        new = [p for p in parameters if not optimizer.state.get(p)]
        if isinstance(optimizer, MomentsOfAdamW):
            new = []  # it makes its moments of zeros, and averages of weights that a skipped step keeps
        step()
        if new:
            _zero_moments(optimizer, new, found_inf.bool())
        del optimizer.found_inf  # type: ignore[attr-defined]

    def diverged(self, step: int, newest_checkpoint: Path | None, output_dir: Path) -> DivergedError:
        """The error that ends the run after step number `step` (from 1), which was skipped.

        output_dir: the run's folder. The remedy names it, since that of a config may depend on
        precision.kind.
        """
        loss, grad_norm = self._last
        count = self.num_skipped_in_a_row
        newest, earlier = "there is no checkpoint", ""
        in_float32 = "compute_dtype=float32"
        if any(p.requires_grad and p.dtype == torch.bfloat16 for p in self._model.parameters()):
            in_float32 += " with optimizer.master=float32"  # master=none is refused with it
        if newest_checkpoint is not None:
            newest = f"the newest checkpoint is {newest_checkpoint}"
            earlier = "; where that does not help, resume=… an earlier checkpoint"
        return DivergedError(
            f"diverged at step {step}: loss {loss:.4g}, gradient norm {grad_norm:.4g}, not finite"
            + (f" for {count} steps in a row" if count > 1 else "")
            + f"; {self._kept(step - count)}, and {newest}. The same config would "
            f"end here again: lower optimizer.lr, or set {in_float32}, or precision.kind=none and "
            f"output_dir={output_dir} (this run's)"
            f"{earlier}"
        )

    def _kept(self, step: int) -> str:
        """What the weights are, after an update in step number `step` and skipped steps."""
        return f"the weights are still those of step {step}"


def _copied_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Starts to copy `values` to the host. The result waits for that, and not for what the device is given
    after it.
    """
    if values.device.type != "cuda" or isinstance(values, FakeTensor):
        return values.tolist
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[float]:
        copied.synchronize()
        numbers: list[float] = on_host.tolist()
        return numbers

    return read


def skips_by_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` changes nothing where its attribute `found_inf` is 1.

    An optimizer says so by `SKIPS_BY_FOUND_INF = True` (listed.py); torch's fused ones say it to GradScaler.
    """
    found = getattr(optimizer, "SKIPS_BY_FOUND_INF", False)
    return bool(found or getattr(optimizer, "_step_supports_amp_scaling", False))


def _zero_moments(optimizer: torch.optim.Optimizer, new: list[nn.Parameter], skipped: Tensor) -> None:
    """Sets the state that the optimizer has just made of the parameters `new` to 0 where `skipped` is set: an
    optimizer such as SGD makes it of unspecified values, which the skipped kernel has not replaced.
    """
    for parameter in new:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.dim():
                on_this_rank(value).masked_fill_(skipped, 0)
