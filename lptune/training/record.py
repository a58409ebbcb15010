"""The record of a step, which becomes a line of metrics.jsonl."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lptune.config import RunConfig
from lptune.distributed import World
from lptune.linear import LowPrecision, Plan
from lptune.models import DecoderConfig
from lptune.training.update import Update, Updated
from lptune.training.utilization import UtilizationMeter, peak_memory_gib


class StepMeter:
    """Measures the time of each step and the utilization of the device."""

    def __init__(self, cfg: RunConfig, plan: Plan, model_config: DecoderConfig, world: World) -> None:
        self._tokens_per_step = cfg.global_batch_size * cfg.data.seq_len
        self._world, self._step_time_s = world, 0.0
        compute_dtype = getattr(torch, cfg.compute_dtype)
        self._utilization = UtilizationMeter(plan, model_config, world, compute_dtype, say=world.print)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times the block: a step from its batches to the end of its update, for which the host waits."""
        started = time.perf_counter()
        yield
        self._step_time_s = time.perf_counter() - started

    def record(
        self,
        step: int,
        updated: Updated,
        num_targets: int,
        lr: float,
        lengths: npt.NDArray[np.int64],
        update: Update,
        low: LowPrecision,
    ) -> dict[str, Any]:
        """The record of the step that was timed last.

        step: number of finished steps. num_targets: targets of all ranks. lengths: number of tokens of each
        document in the rows of the step, over all ranks.
        """
        fraction = low.verified.low_precision_flops_fraction
        used = self._utilization(self._step_time_s, lengths, fraction)
        return {
            "step": step,
            "loss": updated.loss,
            "num_target_tokens": num_targets,
            "lr": lr,
            "grad_norm": updated.grad_norm,
            "num_skipped": update.num_skipped,
            "tokens_per_s": self._tokens_per_step / self._step_time_s,
            "step_time_s": self._step_time_s,
            "peak_memory_gib": peak_memory_gib(self._world.device),
            "low_precision_flops_fraction": fraction,
            "mfu": used.mfu,
            "bf16_mfu": used.bf16_mfu,
        }
