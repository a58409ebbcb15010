"""Stands in for pinning, which needs a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def pinned_addresses() -> Iterator[set[int]]:
    """Within it a pinned copy is a clone whose address is in the set."""
    addresses: set[int] = set()

    def pin(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        copy = tensor.clone()
        addresses.add(copy.untyped_storage().data_ptr())
        return copy

    def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
        return tensor.untyped_storage().data_ptr() in addresses

    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", pin, "CPU", allow_override=True)
    library.impl("is_pinned", is_pinned, "CPU", allow_override=True)
    try:
        yield addresses
    finally:
        library._destroy()
