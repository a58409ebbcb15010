"""Compiles the Triton kernels for a GPU that is not there, and reads what came out of it."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton

from lptune.kernels.triton import again, launch
from tests.helpers.triton_calls import calls, grouped_calls, stand_in_gpu

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a program can have on each architecture (CUDA C++ programming guide, "technical specifications")."""


class Compiled(NamedTuple):
    """One kernel on one architecture."""

    name: str
    ptx: str
    num_warps: int
    registers: int
    spilled_bytes: int  # the stack of a thread; Triton's kernels use it for nothing else
    shared_bytes: int

    @property
    def tensor_core(self) -> str:
        """The matrix instructions it uses."""
        pattern = r"(wgmma\.mma_async[\w.:]+|mma\.sync[\w.:]+|tcgen05\.mma[\w.:]+)"
        return " ".join(sorted(set(re.findall(pattern, self.ptx))))


def configurations(call: str, arch: int, folder: Path, tma: bool = True) -> tuple[Any, ...]:
    """All that autotuning may choose for `call` of tests/helpers/triton_calls.py; (None,) of one without.
    tma: if the GPU has it.
    """
    found: list[Any] = []

    def tuned(key: str, configs: Sequence[Any], run: Callable[[Any], object], device: Any) -> Any:
        found.extend(configs)
        return configs[-1]

    _call(call, arch, folder, tma, tuned)
    return tuple(found) or (None,)


def compile_for(call: str, arch: int, config: Any, folder: Path, tma: bool = True) -> list[Compiled]:
    """The kernels of `call` on `arch`, with one of `configurations`."""
    return [_read(each) for each in _call(call, arch, folder, tma, lambda *_: config)]


def _call(call: str, arch: int, folder: Path, tma: bool, tuned: Callable[..., Any]) -> list[Any]:
    found, run = [], again.Launch.run

    def kept(made: again.Launch, *tensors: Any) -> Any:
        found.append(run(made, *tensors))
        return found[-1]

    with stand_in_gpu(folder, arch), pytest.MonkeyPatch.context() as patch:
        patch.setattr(again.Launch, "run", kept)
        patch.setattr(launch, "tuned", tuned)
        patch.setattr(launch, "has_tma", lambda device: tma and arch >= 90)
        function, inputs = (calls() | grouped_calls())[call]
        function(*inputs)
    return found


def _read(compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump)
    assert usage, dump
    registers, stack, local = map(int, usage.groups())
    meta = compiled.metadata
    return Compiled(meta.name, compiled.asm["ptx"], meta.num_warps, registers, stack + local, meta.shared)
