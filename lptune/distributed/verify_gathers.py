"""Verifies the first step: whether its gathers moved the bytes that follow from the precision plan.

FSDP2 gathers the parameters of a block in one all-gather: weights that `gather_in_8_bits` chose as 8-bit
rows, other parameters, such as a norm or a bias, in the compute dtype. Its size follows from the shapes:

    sum over 8-bit weights of R * ceil(N / R) * (16 + K)
    + sum over the other parameters of R * ceil(N / R) * (numbers per row) * (bytes of the compute dtype)

for R ranks on the axis. If a weight of a block is gathered in high precision, or in rows that are too long,
the gather of that block has a size that no block has in the plan. The verification in lptune.linear tells
which weight it is.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lptune.distributed.collective_counts import Collectives, record_collectives
from lptune.distributed.parallelize import reshard
from lptune.kernels import NUMBER, gathered_bytes
from lptune.linear import LowPrecisionLinear, PrecisionNotAppliedError
from lptune.linear.weights.master_weight import planned_bytes

FSDP_AXIS = "fsdp"


@contextmanager
def verify_collectives(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    report: Callable[[str], None],
    frozen: nn.Module | None = None,
) -> Iterator[None]:
    """Records the collectives of the passes in the block, reports them in one line if there are several
    ranks, and compares FSDP's gathers with `planned_gathers`.

    frozen: a second model that runs in the block without being trained, such as a teacher. Raises
    PrecisionNotAppliedError for a gather that no block plans, if any is planned in 8 bits.
    """
    # Otherwise FSDP would not gather again what an evaluation left gathered, and the count would miss it.
    reshard(model)
    if frozen is not None:
        reshard(frozen)
    with record_collectives(mesh) as executed:
        yield
    if mesh.size() > 1:
        report(f"collectives: {executed}")
    planned = planned_gathers(model, compute_dtype)
    if frozen is not None:
        gathers = planned_gathers(frozen, compute_dtype)
        planned |= {f"frozen {name or 'model'}": sizes for name, sizes in gathers.items()}
    _check(executed, planned, mesh)
    _check_tokens(model, executed)


def planned_gathers(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """FSDP module -> (bytes of its all-gather, bytes of 8-bit weights among them)."""
    reshard(model)  # otherwise frozen parameters that FSDP left gathered would be missed
    in_8_bits = {
        id(layer.weight): layer.spec
        for layer in model.modules()
        if isinstance(layer, LowPrecisionLinear) and _gathers_low(layer)
    }
    planned, seen = dict[str, tuple[int, int]](), set[int]()
    # Children first, so that each parameter counts for its innermost FSDP module.
    for name, module in reversed(list(model.named_modules())):
        is_group = isinstance(module, FSDPModule)  # a variable: in the condition, mypy would lose nn.Module
        if not is_group:
            continue
        low = other = 0
        for parameter in module.parameters():
            if id(parameter) in seen or not isinstance(parameter, DTensor):
                continue
            seen.add(id(parameter))
            if id(parameter) in in_8_bits:
                low += planned_bytes(parameter, in_8_bits[id(parameter)])
            else:
                other += _padded_numel(parameter) * compute_dtype.itemsize
        if low + other:
            planned[name] = (low + other, low)
    return planned


def _gathers_low(layer: LowPrecisionLinear) -> bool:
    """Whether the plan gathers the weight in 8 bits. Does not look at the weight: a weight that is no longer
    wrapped is a fault to report.
    """
    return layer.spec.kind.keys.stores_low or gathered_bytes(int(layer.handle[NUMBER])) is not None


def _padded_numel(parameter: DTensor) -> int:
    """Number of elements that a gather brings; the rows of each rank are padded to those of the first."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or (FSDP_AXIS,)
    num_ranks = mesh.size(names.index(FSDP_AXIS))
    placements = [
        Replicate() if name == FSDP_AXIS else each
        for name, each in zip(names, parameter.placements, strict=True)
    ]
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return -(-shape[0] // num_ranks) * num_ranks * torch.Size(shape[1:]).numel()


def _check_tokens(model: nn.Module, executed: Collectives) -> None:
    """Raises unless all modules with 8-bit gathers of their input made equally many of them."""
    hows = {name: getattr(module, "token_gather", "none") for name, module in model.named_modules()}
    modules = [name for name, how in hows.items() if how not in ("none", "high")]
    gathers = sum(
        count
        for each, count in executed.items()
        if (each.operation, each.axis, each.dtype) == ("all_gather", "tensor", "uint8")
    )
    if modules and (gathers == 0 or gathers % len(modules)):
        raise PrecisionNotAppliedError(
            f"the step gathered activations in 8 bits {gathers} times, where {len(modules)} modules should "
            f"gather their input equally often ({modules[0]}, …)"
        )


def _check(executed: Collectives, planned: dict[str, tuple[int, int]], mesh: DeviceMesh) -> None:
    if not any(low for _, low in planned.values()):
        return
    groups = Counter(size for size, _ in planned.values())
    calls = Counter[int]()
    others = list[str]()
    for each, count in executed.items():
        if each.operation == "all_gather" and each.axis == FSDP_AXIS:
            calls[each.num_bytes] += count
            if each.num_bytes not in groups:
                others.append(f"{each.dtype}, {each.num_bytes:,} bytes, {count} times")
    if others:
        wanted = "; ".join(
            f"{count} modules of {size:,} bytes, of which {calls[size]} gathers ran"
            for size, count in sorted(groups.items())
        )
        raise PrecisionNotAppliedError(
            f"the step did not gather as planned: no module's weights take an all-gather in "
            f"{'; or in '.join(others[:5])}; planned: {wanted}"
        )
    # On one rank FSDP gathers without a collective.
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    missing = [name for name, (size, low) in planned.items() if low and not calls[size]]
    if missing and sizes.get(FSDP_AXIS, 1) > 1:
        raise PrecisionNotAppliedError(
            "the step did not gather as planned: no all-gather ran of the size of "
            f"{missing[0] or 'the model'}"
        )
