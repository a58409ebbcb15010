"""The groups in which FSDP2 gathers parameters, found from the modules that `fully_shard` was applied to.

A parameter belongs to the innermost of them. But a group of float32 parameters, or of experts that are
sharded over fewer ranks (distributed/parallelize.py), has some of a module's, and leaves all others to the
groups inside and around it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

FSDP_AXIS = "fsdp"
_ATTRIBUTE = "_names_of_group"


class Group(NamedTuple):
    """Parameters that one all-gather brings."""

    name: str
    """Of the module that `fully_shard` was applied to."""
    parameters: list[nn.Parameter]
    in_float32: bool
    """Whether they are gathered in float32, whatever the compute dtype is."""


def note_group(module: nn.Module, names: Iterable[str], *, in_float32: bool) -> None:
    """Says that `fully_shard` made of `module` the group of the parameters with these names in it alone."""
    object.__setattr__(module, _ATTRIBUTE, (frozenset(names), in_float32))


def fsdp_groups(model: nn.Module) -> Iterator[Group]:
    """The groups of `model`, inner modules first. A parameter that was gathered is not its shard: `reshard`
    comes before.
    """
    found: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    noted = {
        name: Group(name, [module.get_parameter(each) for each in of_group[0]], of_group[1])
        for name, module in found
        if (of_group := vars(module).get(_ATTRIBUTE))
    }
    seen = {id(each) for group in noted.values() for each in group.parameters}
    for name, module in reversed(found):
        if name in noted:
            yield noted[name]
            continue
        own = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        yield Group(name, own, False)


def padded_numel(parameter: DTensor) -> int:
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
