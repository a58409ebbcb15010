"""`@constant_result`: compiled code calls the function once, while it is traced, and keeps the result.

What `torch.compiler.assume_constant_result` does. That one imports the compiler, and with it Triton, which
would double the time in which a run without compilation starts.
"""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Marks `function`, in place: a function of what does not change within a process."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
