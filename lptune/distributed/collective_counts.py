"""Counts the collectives that execute: operation, dtype, number of calls and bytes.

Every collective, with any caller (gathers of FSDP2, a DTensor that changes its layout, a functional
collective in a compiled graph) and any backend (gloo, NCCL), is in the end an operator `c10d::…` of torch's
dispatcher. It is counted there. During a recording, each of these operators has a kernel at the dispatch key
BackendSelect, which every call passes just before its backend; the kernel makes a note and passes the call
on. Other places see less: a TorchDispatchMode makes torch.compile trace again and sees nothing inside a
compiled graph, and calls from C++ bypass a wrapped function of torch.distributed. After the recording the
kernels are removed, so that a collective costs nothing extra.

The size of a collective is the larger of its input and its output, with this rank's own part: the gathered
buffer for an all-gather, the input buffer for a reduce-scatter. In a ring of n ranks each rank receives
(n - 1) / n of it; in an all-reduce, which is both, twice that.

`verify_collectives` compares those of the first step with the plan (lptune/linear/verify.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from lptune import linear
from lptune.base.text import size_text
from lptune.distributed.parallelize import reshard
from lptune.distributed.session import Experts
from lptune.models import Group

_FSDP_AXES = (linear.FSDP_AXIS, f"{linear.FSDP_AXIS} of experts")
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
"""Operator of c10d -> its name here. Barriers are left out: they move no data."""


class Collective(NamedTuple):
    """A kind of collective. Calls with equal fields are counted together."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, …"""
    dtype: str
    """For example `bfloat16`. A gather of float8 rows moves uint8."""
    num_bytes: int
    """The larger of input and output of one call on this rank."""
    axis: str
    """The mesh axis that it runs over, `all` for all ranks, or torch's name of another group."""


class Collectives(Counter[Collective]):
    """Collective -> number of calls."""

    def num_bytes(self, **fields: str) -> int:
        """Bytes of all calls with these fields: `num_bytes(operation="all_gather", dtype="uint8")`."""
        return sum(each.num_bytes * count for each, count in self._having(fields))

    def num_calls(self, **fields: str) -> int:
        """Number of all calls with these fields."""
        return sum(count for _, count in self._having(fields))

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """(operation, dtype, axis, calls, bytes) for each operation, dtype and axis, sorted."""
        kinds = sorted({(each.operation, each.dtype, each.axis) for each in self})
        found = []
        for operation, dtype, axis in kinds:
            fields = {"operation": operation, "dtype": dtype, "axis": axis}
            found.append((operation, dtype, axis, self.num_calls(**fields), self.num_bytes(**fields)))
        return found

    def __str__(self) -> str:
        """One line: `all_gather uint8 28 x, 12.3 MB; reduce_scatter float32 14 x, …`, or `none`. The axis is
        named if there is more than one.
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


_recordings: list[tuple[Collectives, dict[str, str]]] = []
_library: torch.library.Library | None = None  # holds the kernels during recordings


@contextmanager
def record_collectives(
    mesh: DeviceMesh | None = None, context: Group | None = None, experts: Experts | None = None
) -> Iterator[Collectives]:
    """Counts every collective that this rank executes within the block, on any thread.

    mesh, context, experts: give the names of axes (`axis_names`). Recordings may be nested; each counts its
    whole block.
    """
    global _library
    recording = (Collectives(), axis_names(mesh, context, experts))
    _recordings.append(recording)
    if _library is None:
        _library = _install()
    try:
        yield recording[0]
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]  # others may be equal
        if not _recordings:
            _library._destroy()
            _library = None


@contextmanager
def verify_collectives(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    report: Callable[[str], None],
    frozen: nn.Module | None = None,
) -> Iterator[None]:
    """Records the collectives of the passes in the block, reports them in one line if there are several
    ranks, and compares gathers with the plan.

    frozen: a second model that runs in the block without being trained, such as a teacher. Raises
    PrecisionNotAppliedError as `linear.verify_gathers`, `verify_reductions` and `verify_token_gathers` do.
    """
    models = {"": model} if frozen is None else {"": model, "frozen ": frozen}
    # Otherwise FSDP would not gather again what an evaluation left gathered, and the count would miss it.
    for each in models.values():
        reshard(each)
    num_reductions = linear.num_narrow_reductions(model)
    with record_collectives(mesh, getattr(model, "group", None), _experts(models.values())) as executed:
        yield
    if mesh.size() > 1:
        report(f"collectives: {executed}")
    planned = dict[str, tuple[int, int]]()
    for prefix, each in models.items():
        reshard(each)
        gathers = linear.planned_gathers(each, compute_dtype)
        planned |= {f"{prefix}{name or (prefix and 'model')}": size for name, size in gathers.items()}
    weights = {
        (each.dtype, each.num_bytes): count
        for each, count in executed.items()
        if each.operation == "all_gather" and each.axis in _FSDP_AXES
    }
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    num_ranks = sizes.get(linear.FSDP_AXIS, 1)
    linear.verify_gathers(planned, weights, num_ranks)
    num_float32 = sum(executed.num_calls(operation="reduce_scatter", axis=axis) for axis in _FSDP_AXES)
    linear.verify_reductions(model, num_reductions, num_float32, num_ranks)
    num_tokens = executed.num_calls(operation="all_gather", axis="tensor", dtype="uint8")
    linear.verify_token_gathers(model, num_tokens)
    num_sent = executed.num_calls(operation="all_to_all", axis="expert", dtype="uint8")
    linear.verify_exchanges(models.values(), num_sent)


def _experts(models: Iterable[nn.Module]) -> Experts | None:
    """`World.experts`, if mixtures of `models` use it."""
    exchanges: Any = (getattr(module, "exchange", None) for model in models for module in model.modules())
    return next((each.experts for each in exchanges if each is not None), None)


def axis_names(
    mesh: DeviceMesh | None, context: Group | None = None, experts: Experts | None = None
) -> dict[str, str]:
    """Name of a process group -> name of its axis of `mesh`, `context` for the ranks that share rows, or
    `all` for the group of all ranks. `experts`: `expert`, and `fsdp of experts` for that axis of its mesh.
    """
    names = {str(dist.group.WORLD.group_name): "all"} if dist.group.WORLD is not None else {}
    if experts is not None:
        for axis in experts.mesh.mesh_dim_names or ():
            names[str(experts.mesh.get_group(axis).group_name)] = f"{axis} of experts"
        names[experts.group.name] = "expert"
    if mesh is not None:
        names |= {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
    return names if context is None else names | {context.name: "context"}


def describe_collective(
    op: Any, args: tuple[Any, ...], result: Any, axes: dict[str, str]
) -> Collective | None:
    """The collective of a call of `op` (of c10d, or a functional collective); None for any other operator.

    result: what the call returned; None if it writes to its arguments.
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
    # Variants end in _coalesced, _into_tensor, _single, _ and more; the names differ between versions.
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
