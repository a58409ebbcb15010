"""The learning rate, and what is due: functions of the step alone, so a checkpoint needs no state of them."""

import math

import torch

from lptune.config import ScheduleConfig


def learning_rate(step: int, num_steps: int, peak: float, cfg: ScheduleConfig) -> float:
    """The rate of update number `step` (from 0) of `num_steps`.

    Warm-up rises linearly and reaches the peak at update `warmup_steps`; then cosine or linear decay reaches
    `peak * min_lr_ratio` at the end of the last update, or the peak stays (constant).
    """
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    if cfg.kind == "constant":
        return peak
    done = (step - cfg.warmup_steps) / max(num_steps - cfg.warmup_steps, 1)
    share = 0.5 * (1 + math.cos(math.pi * done)) if cfg.kind == "cosine" else 1 - done
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def is_due(step: int, every_steps: int, is_last: bool = False) -> bool:
    """Whether something is due that happens every `every_steps` steps and after the last one; never for 0."""
    return every_steps > 0 and (is_last or step % every_steps == 0)
