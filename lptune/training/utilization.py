"""How much of the device a step used: model FLOPs utilization against each dtype's own peak, and memory.

A run in which a share f of the GEMM FLOPs runs in 8 bits at twice the bf16 peak could at best take
`(1 - f) / peak_bf16 + f / peak_8bit` per FLOP. `mfu` measures against that; `bf16_mfu` against bf16's peak
alone, the figure that compares with bf16 runs and may exceed 1.
"""

import resource
from typing import NamedTuple

import torch

# Dense peaks in FLOP/s, (bf16, 8 bits), from the vendors' data sheets.
_PEAKS = {
    "H200": (989e12, 1979e12),
    "H100": (989e12, 1979e12),
    "A100": (312e12, 624e12),
    "B200": (2250e12, 4500e12),
    "L40S": (362e12, 733e12),
    "RTX 4090": (165e12, 661e12),
}


class Utilization(NamedTuple):
    """Shares of the peak; None where the device's peak is unknown (CPUs, other GPUs)."""

    mfu: float | None
    bf16_mfu: float | None


def peak_flops_per_s(device_name: str) -> tuple[float, float] | None:
    """Dense peaks in FLOP/s of a device, (bf16, 8 bits); None where unknown."""
    return next((peaks for key, peaks in _PEAKS.items() if key in device_name), None)


def utilization(
    flops_per_s: float, low_precision_fraction: float | None, device: torch.device, num_devices: int
) -> Utilization:
    """flops_per_s: model FLOPs (recomputation apart) per second over all devices.

    low_precision_fraction: share of them in 8 bits; None (not measured) leaves mfu unknown.
    """
    peaks = peak_flops_per_s(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    if peaks is None:
        return Utilization(None, None)
    bf16, low = peaks
    per_device = flops_per_s / num_devices
    if low_precision_fraction is None:
        return Utilization(None, per_device / bf16)
    best = 1 / ((1 - low_precision_fraction) / bf16 + low_precision_fraction / low)
    return Utilization(per_device / best, per_device / bf16)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: allocated on the GPU, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
