"""The random keys of `precision.stochastic_rounding`.

    rounding = StochasticRounding(model, plan, seed)
    for step ...:
        for i, batch in enumerate(micro_batches):
            rounding.start(step, first + i)     # i counts through the step's global batch, over ranks
            loss(batch).backward()

The random bits that round an element of a gradient depend on a key and on an index. The key is a hash of
(seed, step, layer name). The index is the element's position in the global batch: the number of the
micro-batch shifts it. So the bits do not depend on the number of ranks.
"""

from torch import nn

from lptune.kernels import KEY, MICRO_BATCH
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.plan import Plan
from lptune.numerics import random_key


class StochasticRounding:
    """Sets the keys of all layers of `plan` that round stochastically; other layers cost nothing."""

    def __init__(self, model: nn.Module, plan: Plan, seed: int) -> None:
        self._seed, self._step = seed, -1
        self._handles = {}
        modules = dict(model.named_modules())
        for layer in plan.converted:
            module = modules.get(layer.name)  # None in a dry run that leaves out blocks
            if isinstance(module, LowPrecisionLinear) and module.spec.stochastic:
                self._handles[layer.name] = module.handle

    def start(self, step: int, micro_batch: int) -> None:
        """Call before the forward and backward pass of a micro-batch. micro_batch: its number within the
        global batch, over all ranks.
        """
        for name, handle in self._handles.items():
            if step != self._step:
                # 0 means that there is no key.
                handle[KEY] = max(1, random_key(self._seed, step, name))
            handle[MICRO_BATCH] = micro_batch
        self._step = step

    def stop(self) -> None:
        """Removes the keys: a backward pass before the next `start` raises an error."""
        for handle in self._handles.values():
            handle[KEY] = 0
        self._step = -1
