"""Stochastic gradient descent, with momentum or without: 4 bytes a parameter beside weight and gradient, or
none.

    momentum_buffer = momentum * momentum_buffer + gradient       0 at first
    weight          = weight * (1 - lr * weight_decay) - lr * momentum_buffer

torch's own SGD adds the decay to the gradient, so that momentum repeats it; here it acts on the weight alone,
as in AdamW. Its fused kernel has no sharding rule for DTensors, so it is called on this rank's parts; where
`found_inf` is 1 it changes nothing.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lptune.distributed import on_this_rank
from lptune.linear import plain_rows
from lptune.training.listed import ListsMoments


class SGD(ListsMoments, torch.optim.Optimizer):
    """SGD over float32 parameters, sharded or not."""

    MOMENTS: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    COUNT = None
    SKIPS_BY_FOUND_INF = True

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        """groups: with weight_decay. options: lr, and momentum; 0: nothing is kept."""
        super().__init__(groups, options)

    def moment_keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return self.MOMENTS if self.defaults["momentum"] else ()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the parameters that have a gradient; none where `found_inf` is 1."""
        assert closure is None, "a closure is not supported"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_updated: Tensor | float = 1.0 if found_inf is None else 1 - found_inf
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffers = list[Tensor]()
                for key in self.moment_keys(parameter):
                    if key not in self.state[parameter]:
                        self.state[parameter][key] = torch.zeros_like(plain_rows(parameter.detach()))
                    buffers.append(on_this_rank(self.state[parameter][key]))
                weight = on_this_rank(plain_rows(parameter.detach()))
                if group["weight_decay"]:
                    weight.mul_(1 - group["lr"] * group["weight_decay"] * is_updated)
                torch._fused_sgd_(
                    [weight],
                    [on_this_rank(parameter.grad)],
                    buffers,
                    weight_decay=0.0,
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,  # the buffer begins as zeros
                    found_inf=found_inf,
                )
