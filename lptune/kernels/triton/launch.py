"""What the launches ask of a device. On CPU tensors kernels run in Triton's interpreter, for tests."""

import functools
import os
from collections.abc import Callable, Sequence

import torch
import triton
import triton.testing

from lptune.kernels.triton.tuning import Config, Tuner, bucket, cache_path

__all__ = ["bucket", "capability", "has_tma", "num_processors", "rounds_float8", "tuned"]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) on Hopper; (0, 0) in the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def rounds_float8(device: torch.device) -> bool:
    """Whether the hardware converts float32 to float8: since Ada."""
    return capability(device) >= (8, 9)


def has_tma(device: torch.device) -> bool:
    """Whether a tile can be loaded by a descriptor. The interpreter can, too."""
    return device.type != "cuda" or capability(device) >= (9, 0)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors. The interpreter pretends to have 3, so that each takes several tiles."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tuned(
    key: str, configs: Sequence[Config], run: Callable[[Config], object], device: torch.device
) -> Config:
    """The fastest of `configs` on this device; the first of them where nothing can be measured."""
    if device.type != "cuda" or os.environ.get("LPTUNE_AUTOTUNE") == "0":
        return configs[0]
    if torch.cuda.is_current_stream_capturing():
        return configs[0]  # measuring would end up in the graph
    return _tuner(device).choose(key, configs, run)


@functools.cache
def _tuner(device: torch.device) -> Tuner:
    path = cache_path(torch.cuda.get_device_name(device), triton.__version__)
    return Tuner(path, _median_ms)


def _median_ms(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"))
