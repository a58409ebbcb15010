"""The record of a step, which becomes a line of metrics.jsonl.

Model FLOPs are those of the linear layers (three GEMMs for every token of the rows, also padding, since it is
computed) and of attention (models/facts.py: pairs that see each other), in forward and backward, without
recomputation. `mfu` is the time that they would take at the peaks, divided by the time of the step; 8-bit
FLOPs of linear layers count at the peak of their format, the others and attention at that of bfloat16.
`bf16_mfu` uses the peak of bfloat16 for all FLOPs: it is comparable with bf16 runs, and may exceed 1.
"""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lptune.config import RunConfig
from lptune.distributed import World
from lptune.hardware.devices import Device, known_device
from lptune.linear import LowPrecision, Plan
from lptune.models import Facts
from lptune.training.update import Update, Updated


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


class Utilization(NamedTuple):
    """Shares of the peak; None if the peak is unknown."""

    mfu: float | None
    bf16_mfu: float | None


class UtilizationMeter:
    """Computes the utilization of the devices of a run, which are all alike."""

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        world: World,
        compute_dtype: torch.dtype,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """say: called with one line if the peak of the GPU, or of a dtype on it, is unknown. A CPU has no
        peak.
        """
        self._plan, self._facts, self._num_devices = plan, facts, world.size
        self._known: Device | None = None
        self._high: float | None = None
        self._low: float | None = None
        if world.device.type != "cuda":
            return
        name = torch.cuda.get_device_name(world.device)
        self._known = known_device(name)
        if self._known is None:
            say(f"note: no mfu: the peak of {name} is not known (lptune/hardware/devices.py has others)")
            return
        self._high = self._known.bf16 if compute_dtype == torch.bfloat16 else None
        specs = [layer.spec for layer in plan.converted if layer.spec and layer.spec.multiplies_in_8_bits]
        fmt = specs[0].fmt if specs else "bf16"  # all layers of a plan have one kind
        self._low = self._known.peak(fmt)
        if self._high is None or self._low is None:
            low = "4 bits" if fmt == "e2m1" else "float8"
            what = f"{compute_dtype}".removeprefix("torch.") if self._high is None else low
            say(f"note: bf16_mfu, but no mfu: the peak of {name} in {what} is not known")

    def __call__(
        self, step_time_s: float, lengths: npt.NDArray[np.int64], low_precision_fraction: float | None
    ) -> Utilization:
        """The utilization in a step, over all devices.

        lengths: number of tokens of each document of the step, with padding (`Loader.document_lengths`).
        low_precision_fraction: share of the linear layers' FLOPs that ran in 8 bits; None (not measured): mfu
        is unknown.
        """
        if self._known is None:
            return Utilization(None, None)
        linear_flops = self._plan.flops_per_token * int(lengths.sum())
        attention_flops = self._facts.attention_flops(lengths)
        device_time_s = step_time_s * self._num_devices
        bf16_mfu = (linear_flops + attention_flops) / self._known.bf16 / device_time_s
        if low_precision_fraction is None or self._high is None or self._low is None:
            return Utilization(None, bf16_mfu)
        low_flops = linear_flops * low_precision_fraction
        high_flops = linear_flops - low_flops + attention_flops
        return Utilization((low_flops / self._low + high_flops / self._high) / device_time_s, bf16_mfu)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, or the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
