"""Properties of a device, and measuring. On CPU tensors, kernels run in Triton's interpreter, for tests."""

import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from lptune.hardware.devices import FLOAT8_CAPABILITY
from lptune.kernels.triton.tuning import Config, Tuner, bucket, cache_path
from lptune.numerics import FORMATS

__all__ = [
    "bucket",
    "capability",
    "format_constants",
    "has_tma",
    "num_processors",
    "rounding",
    "rounding_of_input",
    "rounds_float8",
    "tuned",
]

LAUNCHES, BATCHES = 10, 3
"""A measured time is the median over BATCHES batches of LAUNCHES launches each."""


def on_gpu(device: torch.device) -> bool:
    """Whether kernels run on a GPU; else in the interpreter."""
    return device.type == "cuda"


def capturing() -> bool:
    """Whether launches are recorded into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability: (9, 0) on Hopper; (0, 0) in the interpreter."""
    return torch.cuda.get_device_capability(device) if on_gpu(device) else (0, 0)


def rounds_float8(device: torch.device, twice: bool = False) -> bool:
    """Whether the hardware converts float32 to float8, as it does since Ada.

    twice: the kernel stores each value in two layouts. Then integer arithmetic rounds: where one store packs
    four conversions into a word and the other stores single bytes, ptxas (of Triton 3.6 and 3.7) loses some
    of the bytes, and stores what a register happened to hold (H100; the cause of triton issue 11111).
    """
    return capability(device) >= FLOAT8_CAPABILITY and not twice


def rounding_of_input(x: torch.Tensor, rounded_to: torch.dtype | None) -> str:
    """The name by which `formats.round_input` knows the rounding of x to `rounded_to`; "" for none."""
    if rounded_to in (None, x.dtype, torch.float32):
        return ""
    if rounded_to == torch.bfloat16 and not on_gpu(x.device):
        return "bfloat16 by integers"  # the interpreter's conversion truncates
    return {torch.bfloat16: "bfloat16", torch.float16: "float16"}[rounded_to]


def rounding(fmt: str) -> str:
    """The name by which `formats.round_to` knows the rounding to `fmt`: all formats of integers have one."""
    return "int8" if FORMATS[fmt].mantissa_bits is None else fmt


def format_constants(
    fmt: str, device: torch.device, power_of_two: bool, twice: bool = False
) -> dict[str, Any]:
    """The constants that say `fmt` and its scales to a quantizer. twice: as for `rounds_float8`."""
    return {
        "FORMAT": rounding(fmt),
        "MAX": FORMATS[fmt].max,
        "POWER_OF_TWO": power_of_two,
        "HARDWARE_FLOAT8": rounds_float8(device, twice),
    }


def has_tma(device: torch.device) -> bool:
    """Whether the TMA can load a tile by a descriptor. The interpreter can, too."""
    return not on_gpu(device) or capability(device) >= (9, 0)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 3 in the interpreter, so that each takes several tiles."""
    if not on_gpu(device):
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tuned(
    key: str, configs: Sequence[Config], run: Callable[[Config], object], device: torch.device
) -> Config:
    """The fastest of `configs` on this device. If measuring is impossible: the result of an earlier
    measurement, or the first configuration that fits the shared memory.
    """
    if not on_gpu(device):
        return configs[0]
    if os.environ.get("LPTUNE_AUTOTUNE") == "0":
        return first_that_fits(key, configs, run)
    tuner = _tuner(device)
    if capturing():  # the graph would capture the measurement
        return tuner.known(key, configs) or first_that_fits(key, configs, run)
    return tuner.choose(key, configs, run)


def first_that_fits(key: str, configs: Sequence[Config], run: Callable[[Config], object]) -> Config:
    """The first of `configs` that the device can launch; remembered by `key`.

    A program has 99 KB of shared memory on consumer GPUs and 227 on Hopper. The need of a configuration is
    known when it is compiled; Triton compares the two before a launch.
    """
    if key not in _fitting:
        for config in configs:
            try:
                run(config)
            except OutOfResources:
                continue
            _fitting[key] = config
            break
        else:
            return configs[0]  # its launch raises the error
    fitting: Config = _fitting[key]
    return fitting


_fitting: dict[str, Any] = {}


@functools.cache
def _tuner(device: torch.device) -> Tuner:
    path = cache_path(torch.cuda.get_device_name(device), triton.__version__)
    return Tuner(path, median_ms, functools.partial(compile_together, device))


def compile_together(device: torch.device, runs: Sequence[Callable[[], object]]) -> None:
    """Calls all of `runs` at once, each in a thread, to compile them: Triton and ptxas take most of a second
    for a configuration, on one core. The first one runs alone, since Triton sets some things up once. It is
    the default, so an error that is not a lack of the device's resources would come from every one of them
    (a machine without a C compiler or Python.h, for example), and is raised here.

    Other errors are ignored: they come again when the configuration is measured. Threads launch on the
    default stream, so the device is synchronized before and after, for callers on other streams.
    """

    def call(run: Callable[[], object]) -> None:
        torch.cuda.set_device(device)  # the device of this thread
        with contextlib.suppress(Exception):
            run()

    torch.cuda.synchronize(device)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.cuda.set_device(device)
    with contextlib.suppress(OutOfResources):
        runs[0]()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // ranks_here)) as pool:
        list(pool.map(call, runs[1:]))
    torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object]) -> float:
    """Milliseconds that the device takes for `run`, which launches a kernel or two.

    The launches of a batch are queued behind a kernel that only waits, so that the time of launching, which
    is as long as a short kernel, is not measured. Nothing is allocated, since the device may be nearly full.
    """
    run()  # compiles
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(BATCHES):
        torch.cuda._sleep(4_000_000)  # cycles: about 2 ms, in which twenty launches are queued on a busy host
        start.record()
        for _ in range(LAUNCHES):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES)
    return float(statistics.median(times))
