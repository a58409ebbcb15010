"""The random keys of `precision.stochastic_rounding`.

    rounding = StochasticRounding(model, plan, seed)
    for step ...:
        for i, batch in enumerate(micro_batches):
            rounding.start(step, first + i)     # i counts through the step's global batch, over ranks
            loss(batch).backward()

A key stands for (seed, step, layer's name), the number of the micro-batch shifts the element's index, so the
bits that round an element of a gradient are those of its place in the global batch.
"""

from torch import nn

from lptune.kernels import KEY, MICRO_BATCH
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.plan import Plan
from lptune.numerics import random_key


class StochasticRounding:
    """Keys for all layers of `plan` that round stochastically; nothing, at no cost, for others."""

    def __init__(self, model: nn.Module, plan: Plan, seed: int) -> None:
        self._seed, self._step = seed, -1
        self._handles = {}
        for layer in plan.converted:
            module = model.get_submodule(layer.name)
            assert isinstance(module, LowPrecisionLinear)
            if module.spec.stochastic:
                self._handles[layer.name] = module.handle

    def start(self, step: int, micro_batch: int) -> None:
        """Before the forward and backward pass of one micro-batch, numbered within the global batch."""
        for name, handle in self._handles.items():
            if step != self._step:
                # 0 stands for no key.
                handle[KEY] = max(1, random_key(self._seed, step, name))
            handle[MICRO_BATCH] = micro_batch
        self._step = step

    def stop(self) -> None:
        """No random key any more: a backward pass before the next `start` is an error."""
        for handle in self._handles.values():
            handle[KEY] = 0
        self._step = -1
