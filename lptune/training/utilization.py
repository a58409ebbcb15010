"""Utilization of the device: model FLOPs against the peak of each dtype, and memory.

Model FLOPs are those of the linear layers (three GEMMs for every token of the rows, also padding, since it is
computed) and of attention (models/flops.py: pairs that see each other), in forward and backward, without
recomputation. `mfu` is the time that they would take at the peaks, divided by the time of the step; 8-bit
FLOPs of linear layers count at the peak of their format, the others and attention at that of bfloat16.
`bf16_mfu` uses the peak of bfloat16 for all FLOPs: it is comparable with bf16 runs, and may exceed 1.
"""

import resource
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lptune.distributed import World
from lptune.hardware.devices import Device, known_device
from lptune.linear import Plan
from lptune.models import Facts


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
        formats = {layer.spec.fmt for layer in plan.converted if layer.spec}
        self._low = self._known.peak(formats.pop()) if formats else self._known.bf16
        if self._high is None or self._low is None:
            what = f"{compute_dtype}".removeprefix("torch.") if self._high is None else "float8"
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
