"""What low precision keeps alive beside a model while it trains, in one object.

    low = linear.LowPrecision(model, plan, optimizer)           after sharding, before loading a checkpoint
    for step in range(num_steps):
        with low.step(step, num_passes=len(batches)):
            for i, batch in enumerate(batches):
                low.micro_batch(i)
                loss(batch).backward()
        optimizer.step()

Four parts make it up. A kind of precision that does not use one pays nothing for it.

    scales      of all weights by one collective a step instead of one a gather    precomputed.py
    histories   of amaxes, by which `float8_delayed` scales                        delayed.py
    rounding    the random bits of `precision.stochastic_rounding`                 stochastic.py
    first step  counted and compared with the plan                                 verify.py

Training without scales is right and slower. Training without histories or random keys is an error of the
kernels. A loop without `step` is still verified, but by less (`verify_first_update`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from lptune.linear.plan import Plan
from lptune.linear.steps.delayed import DelayedScaling
from lptune.linear.steps.precomputed import PrecomputedScales
from lptune.linear.steps.stochastic import StochasticRounding
from lptune.linear.steps.verify import FirstStep, Verified


class Ranks(Protocol):
    """The part of `distributed.World` that is used here."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    @property
    def data_size(self) -> int:
        """The number of ranks that train on different rows."""

    def max_(self, values: Tensor) -> None:
        """Replaces `values` by their elementwise maximum over all ranks. A collective."""

    def print(self, text: str) -> None:
        """Prints on one rank."""


class LowPrecision:
    """The live state of the low-precision layers of a model, and the verification of its first step."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *optimizers: torch.optim.Optimizer,
        world: Ranks | None = None,
        seed: int = 0,
        verify: bool = True,
        watch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """model: converted by `plan`, and sharded if it will be. optimizers: all that update its weights.

        world: a session's; its loop multiplies the loss by `data_size`, since FSDP averages gradients. None:
        the device of the model's parameters and the process group, if there is one. seed: of the random
        bits. verify: compare the first step with the plan; watch: entered around that step as well.

        Raises UserError where weights are to be gathered in 8 bits and `model` is not sharded.
        """
        self._scales = PrecomputedScales(model, *optimizers)  # gathers find it by their layers' numbers
        if world is None:
            device = next(iter(model.parameters())).device
            self._histories = DelayedScaling(plan, device)
            report: Callable[[str], None] = print
        else:
            self._histories = DelayedScaling(plan, world.device, world.max_, world.data_size)
            report = world.print
        self._rounding = StochasticRounding(model, plan, seed)
        self._first_step = FirstStep(model, plan, enabled=verify, report=report, watch=watch)
        self._step: int | None = None

    @contextmanager
    def step(self, step: int, num_passes: int) -> Iterator[None]:
        """Around the forward and backward passes of one optimizer step, on every rank.

        step: its number, from which random bits are drawn. num_passes: forward and backward passes of this
        rank. Raises PrecisionNotAppliedError where the first step did not run as planned.
        """
        self._step = step
        try:
            with self._first_step(num_passes), self._histories.step():
                yield
        finally:
            self._step = None
            self._rounding.stop()

    def micro_batch(self, number: int) -> None:
        """Before each forward pass of a step. number: of the micro-batch within the global batch, counted
        over all ranks, so that the random bits do not depend on how many ranks there are. Raises RuntimeError
        outside of `step`.
        """
        if self._step is None:
            raise RuntimeError("LowPrecision.micro_batch belongs inside `with low.step(step, num_passes):`")
        self._rounding.start(self._step, number)

    def undo(self, skipped: Tensor) -> None:
        """Forgets the last step where `skipped` is set, a 0-dimensional bool on the device: for an update
        that was not made. The host does not wait.
        """
        self._histories.undo(skipped)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs, by name: the live tensors, to be saved, or filled. `loaded` comes then."""
        return self._histories.state()

    def loaded(self) -> None:
        """After `state` was filled: what follows, an evaluation too, scales by the histories in it."""
        self._histories.loaded()

    @property
    def first_step_agrees(self) -> bool:
        """Whether ranks exchange amaxes in the first step alone, which has no history to go by."""
        return self._histories.first_step_agrees

    @property
    def verified(self) -> Verified:
        """What the first step was found to be; empty before it ended, and where it is not verified."""
        return self._first_step.verified
