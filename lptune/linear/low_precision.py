"""LowPrecision: the state that low precision needs during training, in one object.

    low = linear.LowPrecision(model, plan, optimizer)           after sharding, before loading a checkpoint
    for step in range(num_steps):
        with low.step(step, num_passes=len(batches)):
            for i, batch in enumerate(batches):
                low.micro_batch(i)
                loss(batch).backward()
        optimizer.step()

It has five parts. A part that the kind does not use costs nothing.

    scales      precomputed for all weights: one collective a step, not one a gather   precomputed.py
    histories   of amaxes, from which `float8_delayed` takes its scales                delayed.py
    rounding    the random bits of `precision.stochastic_rounding`                     stochastic.py
    reductions  the random bits of `parallel.reduce_dtype=int8`                        reduce_scatter.py
    first step  its GEMMs, gathers and reductions are compared with the plan           verify.py

Without LowPrecision, weights are gathered with the same scales, but slower; kinds that need histories or
random keys raise an error in their kernels. A loop that does not use `step` is still verified, but less
strictly (`verify_first_update`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from lptune.linear.module import LowPrecisionLinear
from lptune.linear.plan import Plan
from lptune.linear.steps.delayed import DelayedScaling
from lptune.linear.steps.precomputed import PrecomputedScales
from lptune.linear.steps.stochastic import StochasticRounding
from lptune.linear.verify import FirstStep, Verified
from lptune.linear.weights.reduce_scatter import ReductionKeys


class Ranks(Protocol):
    """The part of `distributed.World` that LowPrecision uses."""

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""

    @property
    def token_size(self) -> int:
        """The number of ranks that train on different tokens."""

    def max_(self, values: Tensor) -> None:
        """Replaces `values` by their elementwise maximum over all ranks. A collective."""

    def print(self, text: str) -> None:
        """Prints `text` on one rank only."""


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
        """model: converted with `plan`; after `fully_shard` or `parallelize`, if one is called. optimizers:
        all that update its weights. plan: from `convert`.

        world: of a session whose loop multiplies the loss by `data_size`, because FSDP averages gradients;
        ranks that share rows multiply it further (models/context.py), to `token_size` in all.
        None: LowPrecision takes the device from the model's parameters, and uses the process group, if any.
        seed: for the random bits. verify: compare the first step with the plan. watch: its context manager
        also surrounds the first step.

        Raises UserError if `gather_in_8_bits` was called, but neither `fully_shard` nor `parallelize`, and a
        weight has one scale, or one per block.
        """
        self._scales = PrecomputedScales(model, *optimizers)  # gathers find it by their layer number
        if world is None:
            device = next(iter(model.parameters())).device
            self._histories = DelayedScaling(plan, device)
            report: Callable[[str], None] = print
        else:
            self._histories = DelayedScaling(plan, world.device, world.max_, world.token_size)
            report = world.print
        self._rounding = StochasticRounding(model, plan, seed)
        self._reductions = ReductionKeys(model, seed)
        self._first_step = FirstStep(model, plan, enabled=verify, report=report, watch=watch)
        self._step: int | None = None
        self.model = model
        self.plan = plan
        """The precision of the steps to come."""

    def leave_out(self, like: Mapping[int, int]) -> None:
        """For a dry run of a model without some of its blocks. like: number of a layer that was left out ->
        that of a layer of the model, whose weight is measured once more for it.
        """
        self._scales.leave_out(like)

    @contextmanager
    def step(self, step: int, num_passes: int) -> Iterator[None]:
        """Surrounds the forward and backward passes of one optimizer step, on every rank.

        step: the step's number; random bits depend on it. num_passes: this rank's number of forward and
        backward passes. Raises PrecisionNotAppliedError if the first step did not run as planned.
        """
        self._step = step
        try:
            with self._first_step(num_passes), self._histories.step():
                yield
        finally:
            self._step = None
            self._rounding.stop()
            self._reductions.stop()

    def micro_batch(self, number: int) -> None:
        """Call before each forward pass of a step. number: the position of the micro-batch in the global
        batch, over all ranks, so that random bits do not depend on the number of ranks. Raises RuntimeError
        outside of `step`.
        """
        if self._step is None:
            raise RuntimeError("LowPrecision.micro_batch belongs inside `with low.step(step, num_passes):`")
        self._rounding.start(self._step, number)
        self._reductions.start(self._step, number)

    @contextmanager
    def outside_of_steps(self, step: int, number: int) -> Iterator[None]:
        """Surrounds passes that update nothing (steps/shadow.py), with the random bits of `step` and of the
        micro-batch `number`.
        """
        self._rounding.start(step, number)
        self._reductions.start(step, number)
        try:
            yield
        finally:
            self._rounding.stop()
            self._reductions.stop()

    def switch_to_high(self, names: Collection[str]) -> None:
        """Runs the layers `names` in compute dtype from the next step on, which is verified as the first is.

        Compiled code is compiled again, because it depends on the spec of each layer. All ranks call it with
        the same names. Raises ValueError if weights are gathered in 8 bits: FSDP keeps the form of a gather.
        """
        self.plan = self.plan.with_high(names)
        for layer in self.plan.converted:
            if layer.name not in names:
                continue
            module = self.model.get_submodule(layer.name)
            assert isinstance(module, LowPrecisionLinear)
            assert layer.spec is not None
            if layer.spec.gathers_low:
                raise ValueError(
                    f"{layer.name}: its weight is gathered in 8 bits, so it has no other precision"
                )
            module.spec = layer.spec
            self._histories.measured_no_more(module.number)
        self._first_step.verify_again(self.plan)
        import torch._dynamo.config as dynamo  # slow to import

        # Blocks share their code. Those that differ in the specs of their layers have a graph each.
        dynamo.recompile_limit += len(names)
        dynamo.accumulated_recompile_limit += len(names)

    def undo(self, skipped: Tensor) -> None:
        """Removes the last step from the histories if its update was skipped. skipped: 0-dimensional bool
        tensor on the device; the host does not wait for it.
        """
        self._histories.undo(skipped)

    def state(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint stores, by name. After filling them in place, call `loaded`."""
        return self._histories.state()

    def loaded(self) -> None:
        """Call after filling the tensors of `state`; training and evaluation then use the new histories."""
        self._histories.loaded()

    def metrics(self) -> dict[str, int]:
        """What the last step adds to its record: for float8_delayed `num_saturated`, the number of tensors
        with values beyond the scale that past steps gave them. The host waits for the device.
        """
        found = self._histories.num_saturated
        return {} if found is None else {"num_saturated": int(found)}

    @property
    def first_step_agrees(self) -> bool:
        """Whether ranks exchange amaxes in the first step alone, which has no history to go by."""
        return self._histories.first_step_agrees

    @property
    def verified(self) -> Verified:
        """The counts of the first step. All are 0 before that step ended, and if `verify` is False."""
        return self._first_step.verified
