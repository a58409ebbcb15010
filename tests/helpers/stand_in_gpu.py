"""A stand-in for a GPU and its driver: Triton compiles for it and launches on it, and nothing runs.

Triton computes everything that it computes for a real GPU, up to the call of the driver in C: it derives the
compiled kernel from the arguments, and a descriptor of the TMA from a tensor. So the arguments of a launch
can be compared on a machine without a GPU. The tensors are in the memory of the CPU, and no kernel writes to
them.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from lptune.kernels.triton import launch
from lptune.kernels.triton.tuning import Tuner

SHARED_BYTES = 227 << 10  # of a program on Hopper


class Address(int):
    """The address of a tensor."""


class Launched(NamedTuple):
    """One launch, as the driver gets it."""

    grid: tuple[int, int, int]
    kernel: str  # name, and a hash of the machine code
    arguments: tuple[Any, ...]
    """Tensors as `Address`, also in a descriptor, which is a tuple."""


class _Utils:
    """The part of Triton's driver that is written in C."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[Any, ...]:
        return name, f"{name} {hashlib.sha256(binary).hexdigest()[:16]}", 0, 0, 1024

    def fill_tma_descriptor_tiled(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


class _Driver:
    """Triton's driver, for a GPU of compute capability `arch`."""

    def __init__(self, arch: int, launched: list[Launched]) -> None:
        self.utils, self._arch, self.launched = _Utils(), arch, launched
        self.launcher_cls = _launcher

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps what it compiled by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


def _launcher(source: Any, metadata: Any) -> Callable[..., None]:
    descriptors = [str(kind).startswith("tensordesc") for kind in source.signature.values()]
    described = getattr(metadata, "tensordesc_meta", None) or [None] * sum(descriptors)

    def run(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        arguments = rest[4:]  # after two kinds of metadata and two hooks
        final, used = [], 0
        for is_descriptor, each in zip(descriptors, arguments, strict=True):
            if is_descriptor:  # as the launcher of CUDA does, in Python too
                final += nvidia.make_tensordesc_arg(each, described[used])
                used += 1
            else:
                final.append(each)
        # Triton keeps compiled kernels with their launchers. The list is that of the active driver.
        launched = triton.runtime.driver.active.launched
        launched.append(Launched((x, y, z), function, tuple(_plain(each) for each in final)))

    return run


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Address(argument.data_ptr())
    if isinstance(argument, tuple):  # a descriptor
        address, *rest = argument
        return Address(address), *(tuple(each) if isinstance(each, Sequence) else each for each in rest)
    return argument


@contextmanager
def stand_in_gpu(folder: Path, arch: int = 90) -> Iterator[list[Launched]]:
    """Within the block, lptune's Triton kernels take CPU tensors for tensors of a GPU; yields all launches.

    folder: for the choices of autotuning, which takes the first configuration.
    """
    launched: list[Launched] = []
    runtime = triton.runtime.driver
    tuner = Tuner(folder / "choices.json", _same_time)
    with ExitStack() as stack:
        patch: Callable[..., Any] = functools.partial(mock.patch.object, launch)
        for name, result in (
            ("capability", (arch // 10, arch % 10)),
            ("on_gpu", True),
            ("num_processors", 132),
            ("_tuner", tuner),
            ("capturing", False),
        ):
            stack.enter_context(patch(name, functools.partial(_always, result)))
        before = runtime._active
        runtime.set_active(_Driver(arch, launched))
        stack.callback(runtime.set_active, before)
        yield launched


def _same_time(run: Callable[[], object]) -> float:
    run()
    return 1.0


def _always(result: Any, *_: Any) -> Any:
    return result
