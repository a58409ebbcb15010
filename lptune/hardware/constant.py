"""`@constant_result`: compiled code calls the function once, while it is traced, and keeps the result.

It does the same as `torch.compiler.assume_constant_result`, which imports the compiler and Triton: that would
double the time to start a run without compilation.
"""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Marks `function`, in place. Its result must not change within a process."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
