"""Alternatives that wait for a measurement: `LPTUNE_TRY=name,name` takes them instead of the default.

If two implementations are both correct, and only hardware can tell which is faster, both are built and
tested, and this variable chooses. docs/gpu.md has the expectation for each and, after a measurement, the
result: the faster one then becomes the default, and its name is removed from here.

Of lptune it imports base and its own package alone, so that every part may ask.
"""

import functools
import os
from collections.abc import Callable
from typing import TypeVar

from lptune.base.errors import UserError, closest

Function = TypeVar("Function", bound=Callable[..., object])
TRIALS = {
    "cublaslt_rowwise": "float8_rowwise: backward GEMMs by cuBLASLt (Hopper, CUDA 12.9), not lptune's kernel",
    "cublaslt_blocks": "float8_blockwise: GEMMs by cuBLASLt (Hopper, CUDA 12.9), not lptune's kernel",
    "cudnn_attention": "on CUDA, where every row is one document: attention by cuDNN, not flash attention 2",
    "fa3_attention": "attention by flash attention 3, where its package is installed",
    "grouped_varlen": "torch 2.11: key heads are handed to flash attention as they are, not repeated",
}
"""Name -> the change that it makes."""


def constant_result(function: Function) -> Function:
    """Compiled code calls the function once, while it is traced, and keeps the result, which must not change
    within a process. Marks it in place, as `torch.compiler.assume_constant_result` does: that imports the
    compiler and Triton, and would double the time to start a run without compilation.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def tries(name: str) -> bool:
    """Whether `LPTUNE_TRY` names the alternative `name`. Raises UserError if it has an unknown name."""
    assert name in TRIALS, name
    return name in _chosen(os.environ.get("LPTUNE_TRY", ""))


def check_trials() -> None:
    """Raises UserError if `LPTUNE_TRY` has an unknown name."""
    _chosen(os.environ.get("LPTUNE_TRY", ""))


@functools.cache
def _chosen(value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(",") if name.strip())
    for name in sorted(names - TRIALS.keys()):
        hint = closest(name, TRIALS) or f"; there are {', '.join(TRIALS)}"
        raise UserError(f"LPTUNE_TRY: unknown name {name!r}{hint}")
    return names
