"""The record of a step, which becomes a line of metrics.jsonl."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lptune.config import RunConfig
from lptune.distributed import World
from lptune.linear import LowPrecision, Plan
from lptune.models import Facts
from lptune.training.update import Update, Updated
from lptune.training.utilization import UtilizationMeter, peak_memory_gib


class StepMeter:
    """Measures the time of each step and the utilization of the device."""

    def __init__(
        self,
        cfg: RunConfig,
        plan: Plan,
        model_config: Facts,
        world: World,
        steps_per_epoch: float | None = None,
    ) -> None:
        """steps_per_epoch: as `Loader.steps_per_epoch`; None: records have no `epoch`."""
        self._tokens_per_step, self._steps_per_epoch = cfg.tokens_per_step, steps_per_epoch
        self._world, self._step_time_s, self._compile_time_s = world, 0.0, 0.0
        self._started_s = self._compiled_s = 0.0
        compute_dtype = getattr(torch, cfg.compute_dtype)
        self._utilization = UtilizationMeter(plan, model_config, world, compute_dtype, say=world.print)

    def start(self) -> None:
        """Begins to time a step."""
        self._started_s, self._compiled_s = time.perf_counter(), self._world.compile_watch.duration_s

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves the time of the block out of that of the step."""
        began_s = time.perf_counter()
        yield
        self._started_s += time.perf_counter() - began_s

    def stop(self) -> None:
        """Ends the step after its update, for which the host has waited. The time of torch.compile is counted
        apart.
        """
        watch = self._world.compile_watch
        self._compile_time_s = watch.duration_s - self._compiled_s
        self._step_time_s = time.perf_counter() - self._started_s - self._compile_time_s
        if (compiled := watch.news()) is not None:
            self._world.print(str(compiled))

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
        document in the rows of the step, over all ranks. `num_tokens` is the number of tokens since the run
        began, with padding; `epoch` the number of times that every row was seen. `step_time_s`, and what is
        computed from it, leaves out `compile_time_s`, which is not 0 in the first step of a launch. `time` is
        now.
        """
        fraction = low.verified.low_precision_flops_fraction
        used = self._utilization(self._step_time_s, lengths, fraction)
        epoch = {"epoch": step / self._steps_per_epoch} if self._steps_per_epoch else {}
        return {
            "step": step,
            **epoch,
            "loss": updated.loss,
            "num_target_tokens": num_targets,
            "num_tokens": step * self._tokens_per_step,
            "lr": lr,
            "grad_norm": updated.grad_norm,
            "num_skipped": update.num_skipped,
            "tokens_per_s": self._tokens_per_step / self._step_time_s,
            "step_time_s": self._step_time_s,
            "compile_time_s": self._compile_time_s,
            "peak_memory_gib": peak_memory_gib(self._world.device),
            "low_precision_flops_fraction": fraction,
            **low.metrics(),
            "mfu": used.mfu,
            "bf16_mfu": used.bf16_mfu,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }


def losses_by_source(
    key: str, sums_N: Tensor, num_targets_N: Sequence[int], names: Sequence[str], world: World
) -> dict[str, float]:
    """The mean loss of each of N data sources, as `key/NAME` for a record; empty if there is one source.

    sums_N: float32, the loss summed over this rank's targets of each source. num_targets_N: number of targets
    of each source, over all ranks; a source without targets is left out. A collective if N > 1.
    """
    if len(names) == 1:
        return {}
    found = zip(names, world.sums(sums_N), num_targets_N, strict=True)
    return {f"{key}/{name}": loss / num_targets for name, loss, num_targets in found if num_targets}
