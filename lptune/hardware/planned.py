"""What device a dry run stands for: its tensors are fake, and on none.

Where memory, layout or the choice of a kernel depends on the device, the choice asks here first. Imports
nothing of lptune, so that every part may ask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

HOPPER = (9, 0)
Function = TypeVar("Function", bound=Callable[..., object])


class Planned(NamedTuple):
    """A device that a dry run stands for."""

    device_type: str
    capability: tuple[int, int]
    """Compute capability, of a GPU."""
    name: str | None
    """None: any device of that type."""


_planned_for: list[Planned] = []


@contextmanager
def planned_for(
    device_type: str, capability: tuple[int, int] = HOPPER, name: str | None = None
) -> Iterator[None]:
    """Within the block tensors count as being on `device_type`, a GPU as one of this capability."""
    _planned_for.append(Planned(device_type, capability, name))
    try:
        yield
    finally:
        _planned_for.pop()


def planned() -> Planned | None:
    """The innermost `planned_for`; None outside a dry run."""
    return _planned_for[-1] if _planned_for else None


def planned_device_type() -> str | None:
    """That of the innermost `planned_for`; None outside a dry run."""
    return _planned_for[-1].device_type if _planned_for else None


def constant_result(function: Function) -> Function:
    """Compiled code calls the function once, while it is traced, and keeps the result, which must not change
    within a process: what the device can do, and how much memory it has. Marks it in place, as
    `torch.compiler.assume_constant_result` does: that imports the compiler and Triton, and would double the
    time to start a run without compilation.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
