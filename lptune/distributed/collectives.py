"""What ranks exchange, counted where it is exchanged: operation, dtype, number of calls and bytes.

Whoever asks for a collective (FSDP2's gathers, a DTensor that changes its layout, a functional collective
that torch compiled into a graph), and whatever carries it (gloo, NCCL), it ends as an operator `c10d::…` of
torch's dispatcher. There it is counted. While somebody records, each of these operators has a kernel at the
dispatch key BackendSelect, which every call passes just before its backend: it takes a note and hands the
call on. Other places see less. A TorchDispatchMode makes torch.compile trace anew and sees nothing inside a
compiled graph; a wrapped function of torch.distributed is bypassed by all that calls from C++. After the
recording the kernels are taken away, and a collective costs what it did before.

The size of a collective is that of its message: the larger of what goes in and what comes out, this rank's
own part included. For an all-gather that is the gathered buffer, for a reduce-scatter the buffer that is cut
up. In a ring of n ranks each receives (n - 1) / n of it; in an all-reduce, which is both, twice that.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

_C10D = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
"""Operators of c10d -> what this package calls them; barriers move nothing."""


class Collective(NamedTuple):
    """One kind of exchange; equal ones are counted together."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, …"""
    dtype: str
    """As `bfloat16`; a gather of float8 rows moves uint8."""
    num_bytes: int
    """The larger of what goes in and what comes out of one call on this rank."""
    axis: str
    """The mesh axis it runs over, `all` ranks, or torch's name of another group."""


class Collectives(Counter[Collective]):
    """How often each was executed."""

    def num_bytes(self, **fields: str) -> int:
        """Of all that have these values: `num_bytes(operation="all_gather", dtype="uint8")`."""
        return sum(each.num_bytes * count for each, count in self._having(fields))

    def num_calls(self, **fields: str) -> int:
        """Likewise."""
        return sum(count for _, count in self._having(fields))

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """(operation, dtype, axis, calls, bytes) of each operation, dtype and axis, in order."""
        kinds = sorted({(each.operation, each.dtype, each.axis) for each in self})
        found = []
        for operation, dtype, axis in kinds:
            fields = {"operation": operation, "dtype": dtype, "axis": axis}
            found.append((operation, dtype, axis, self.num_calls(**fields), self.num_bytes(**fields)))
        return found

    def __str__(self) -> str:
        """`all_gather uint8 28 x, 12.3 MB; reduce_scatter float32 14 x, …`, with the axis where it is not
        FSDP's alone; `none`.
        """
        rows = self.rows()
        several = {axis for _, _, axis, _, _ in rows} != {"fsdp"}
        parts = [
            f"{operation}{f' over {axis}' * several} {dtype} {calls} x, {size_text(num_bytes)}"
            for operation, dtype, axis, calls, num_bytes in rows
        ]
        return "; ".join(parts) or "none"

    def _having(self, fields: dict[str, str]) -> list[tuple[Collective, int]]:
        return [
            (each, count)
            for each, count in self.items()
            if all(getattr(each, name) == value for name, value in fields.items())
        ]


def size_text(num_bytes: float) -> str:
    """`512 B`, `12.3 MB`, in powers of 1000."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB"))


def flop_text(num_flops: float) -> str:
    """`300 FLOP`, `12.3 MFLOP`, likewise."""
    return _scaled(num_flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    for unit in units:
        if number < 1000 or unit == units[-1]:
            break
        number /= 1000
    return f"{number:,.{0 if unit == units[0] else 1}f} {unit}"


_recordings: list[tuple[Collectives, dict[str, str]]] = []
_library: torch.library.Library | None = None  # the kernels, while there are recordings


@contextmanager
def record_collectives(mesh: DeviceMesh | None = None) -> Iterator[Collectives]:
    """Counts every collective that executes on this rank within the block, on whatever thread.

    mesh: whose axes the counts name. Recordings may be nested; each sees all of its block.
    """
    global _library
    recording = (Collectives(), axis_names(mesh))
    _recordings.append(recording)
    if _library is None:
        _library = _install()
    try:
        yield recording[0]
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]  # equal ones stay
        if not _recordings:
            _library._destroy()
            _library = None


def axis_names(mesh: DeviceMesh | None) -> dict[str, str]:
    """Name of a process group -> the axis of `mesh` that it is, or `all` for the group of all ranks."""
    names = {str(dist.group.WORLD.group_name): "all"} if dist.group.WORLD is not None else {}
    if mesh is not None:
        names |= {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
    return names


def describe_collective(
    op: Any, args: tuple[Any, ...], result: Any, axes: dict[str, str]
) -> Collective | None:
    """What a call of `op`, an operator of c10d or a functional collective, exchanges; None of any other.

    result: what it returned; None where it writes to its arguments.
    """
    operation = _operation(op)
    if operation is None:
        return None
    names = [argument.name for argument in op._schema.arguments[: len(args)]]
    sizes, group, dtype = [_num_bytes(result)], "", None
    for name, value in zip(names, args, strict=True):
        if name in ("process_group", "group_name", "group"):
            group = value if isinstance(value, str) else ProcessGroup.unbox(value).group_name
        elif tensors := [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]:
            sizes.append(_num_bytes(tensors))
            dtype = dtype or tensors[0].dtype
    return Collective(operation, str(dtype).removeprefix("torch."), max(sizes), axes.get(group, group))


def _operation(op: Any) -> str | None:
    name = op._schema.name
    namespace, _, name = name.partition("::")
    if namespace == "c10d":
        return _C10D.get(name)
    if not namespace.startswith("_c10d_functional"):
        return None
    # Variants end in _coalesced, _into_tensor, _single, _ and more, and their names change with torch.
    return next((each for each in dict.fromkeys(_C10D.values()) if name.startswith(each)), None)


def _num_bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _install() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name in _C10D:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, below), "BackendSelect", with_keyset=True)
    return library


def _kernel(op: Any, below: Any) -> Any:
    def note_and_pass_on(keys: Any, *args: Any) -> Any:
        for counted, axes in _recordings:
            found = describe_collective(op, args, None, axes)
            assert found is not None
            counted[found] += 1
        return op.redispatch(keys & below, *args)

    return note_and_pass_on
