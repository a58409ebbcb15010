"""What device a dry run stands for: its tensors are fake, and on none.

Where memory or layout depends on the kind of device, the choice asks here first. Imports nothing of lptune,
so that every part may ask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_planned_for: list[str] = []


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Within the block tensors count as being on `device_type`."""
    _planned_for.append(device_type)
    try:
        yield
    finally:
        _planned_for.pop()


def planned_device_type() -> str | None:
    """That of the innermost `planned_for`; None outside a dry run."""
    return _planned_for[-1] if _planned_for else None
