"""The learning rate, and what is due: functions of the step alone, so a checkpoint needs no state of them."""

import math
from collections.abc import Callable

import torch

from lptune.config import ScheduleConfig


def learning_rate(step: int, num_steps: int, peak: float, cfg: ScheduleConfig) -> float:
    """The rate of update number `step` (from 0) of `num_steps`.

    Warm-up rises linearly and reaches the peak at update `warmup_steps`. Then the rate falls by cosine or
    linearly, or the peak stays (constant). The first update of a decay is at the peak, and `peak *
    min_lr_ratio` would be the rate of update `num_steps`, the one after the last: so no update is lost to a
    rate of 0. Transformers and torchtitan count in the same way.

    wsd (warm-up, stable, decay; MiniCPM, arXiv:2404.06395): the peak stays until update `num_steps -
    decay_steps`, where the decay begins. Until there the rate does not depend on `num_steps`, so a run that
    is resumed in its stable phase with more steps is the longer run from the start. The shape 1-sqrt,
    1 - sqrt(x) for the share x of the decay that is done, ended with a lower loss than linear in
    arXiv:2405.18392.
    """
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    first = num_steps - cfg.decay_steps if cfg.kind == "wsd" else cfg.warmup_steps
    if cfg.kind == "constant" or step < first:
        return peak
    done = (step - first) / max(num_steps - first, 1)
    share = _SHAPES[cfg.decay_shape if cfg.kind == "wsd" else cfg.kind](done)
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
"""From the share of the decay that is done to the share of the peak that is left."""


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def is_due(step: int, every_steps: int, is_last: bool = False) -> bool:
    """Whether something is due that happens every `every_steps` steps and after the last one; never for 0."""
    return every_steps > 0 and (is_last or step % every_steps == 0)
