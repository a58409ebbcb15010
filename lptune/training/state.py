"""What a training changes besides the weights, in one place: optimizer, low precision and update.

They depend on each other, and this is their order. The optimizer is made of the sharded parameters; low
precision keeps scales until a step of that optimizer; the update steps the optimizer, and takes a step that
it skipped out of the amax histories. In a step, the passes run within `LowPrecision.step`, and the update
comes after them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lptune.config import RunConfig
from lptune.data import Batch
from lptune.distributed import World, accumulate, verify_collectives
from lptune.linear import LowPrecision, Plan
from lptune.models import Backbone
from lptune.training.in_backward import build_update
from lptune.training.schedule import learning_rate, set_learning_rate
from lptune.training.update import Updated


class State:
    """The live state of the training of one model, on this rank."""

    def __init__(
        self,
        model: Backbone,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        cfg: RunConfig,
        world: World,
        *,
        frozen: LowPrecision | None = None,
    ) -> None:
        """model: parallelized and materialized. plan: of `linear.convert`. optimizer: of the trained
        parameters (`build_optimizer`, or your own). frozen: of a second model, which runs in each step
        without being trained; the GEMMs and gathers of its first step are verified, too.

        Raises ValueError as `LowPrecision` does.
        """
        self.model, self.optimizer = model, optimizer
        watch = partial(
            verify_collectives,
            model,
            world.mesh,
            getattr(torch, cfg.compute_dtype),
            world.print,
            frozen=None if frozen is None else frozen.model,
        )
        self.low = LowPrecision(
            model, plan, optimizer, world=world, seed=cfg.seed, verify=cfg.precision.verify, watch=watch
        )
        self.update = build_update(model, optimizer, world, cfg, self.low)
        self._cfg, self._world, self._frozen = cfg, world, frozen

    def passes(self, step: int, num_steps: int, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Sets the learning rate of the step `step` of `num_steps`, counted from 0, and yields this rank's
        micro-batches of it for forward and backward. Raises PrecisionNotAppliedError after the last one, if
        the first step did not run as planned.
        """
        set_learning_rate(self.optimizer, self._rate(step, num_steps))
        frozen = nullcontext() if self._frozen is None else self._frozen.step(step, len(batches))
        with self.low.step(step, len(batches)), frozen:
            yield from accumulate(self.model, batches, self._world, self._cfg, self.low)

    def step(self, step: int, num_steps: int, loss_sum: Tensor, count: int) -> tuple[Updated, float]:
        """Updates the weights, unless backward did (optimizer.in_backward), and clears the gradients. Returns
        what `Update` does, and the learning rate. A collective.

        loss_sum: over the micro-batches of this rank, on the device. count: of what the loss is the mean of,
        over all ranks.
        """
        return self.update(loss_sum, count), self._rate(step, num_steps)

    def _rate(self, step: int, num_steps: int) -> float:
        return learning_rate(step, num_steps, self._cfg.optimizer.lr, self._cfg.schedule)

    def counts(self) -> dict[str, float]:
        """The numbers of skipped steps, for a checkpoint; and a gradient norm, if the next step clips by
        it.
        """
        return self.update.counts()

    def restore_counts(self, saved: Mapping[str, float]) -> None:
        """Goes on from the `counts` of a checkpoint."""
        self.update.restore(saved)
