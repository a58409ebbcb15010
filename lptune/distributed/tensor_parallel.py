"""Tensor and sequence parallelism: each matrix of a model is cut over the ranks of the mesh axis `tensor`.

Megatron's scheme (arXiv:1909.08053, 2205.05198): q, k, v, gate and up are cut by output features, so that
each rank has whole heads and its share of the MLP; o and down are cut by input features. Each such pair needs
two collectives, one before and one after (activation_collectives.py). With sequence parallelism, norms and
residuals are cut by tokens, and both collectives run in forward and in backward. Without it, the one before
only sums gradients in backward, and the one after only sums outputs in forward. The vocabulary is cut in the
embedding, the head and the loss; its size need not divide.

A model says in `tensor_plan` which module is cut how; styles.py says how one module is cut. For a module that
is no Backbone, write a style plan (docs/distributed.md).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lptune.base.errors import UserError
from lptune.distributed.session import World
from lptune.distributed.styles import (
    ColumnParallel,
    FeatureParallelNorm,
    GatheredInput,
    GatheredOutput,
    Replicated,
    RowParallel,
    VocabParallelEmbedding,
    WordParallelHead,
)
from lptune.models import Backbone, aliases, tie
from lptune.models.backbone import Cut

STYLES: dict[str, Callable[[Cut, bool], ParallelStyle]] = {
    "columns": lambda cut, sequence: ColumnParallel(cut.fused_rows),
    "rows": lambda cut, sequence: RowParallel(sequence),
    "input": lambda cut, sequence: GatheredInput(sequence),
    "output": lambda cut, sequence: GatheredOutput(sequence),
    # Ranks have different tokens, or different heads, so they sum the norm's gradient.
    "norm": lambda cut, sequence: Replicated(partial=sequence),
    "norm in heads": lambda cut, sequence: Replicated(partial=True),
    "norm over features": lambda cut, sequence: FeatureParallelNorm(),
    "embedding": lambda cut, sequence: VocabParallelEmbedding(sequence),
    # Logits stay cut by words: the losses of a Backbone take them so.
    "head": lambda cut, sequence: WordParallelHead(),
}
"""By the name in `models.backbone.Cut`: (cut, whether to cut the tokens of norms and residuals) -> style."""


def cut_backbone(model: Backbone, mesh: DeviceMesh, sequence: bool) -> None:
    """Cuts a Backbone over `mesh` (the axis `tensor`) by its own plan, in place. Call it before activation
    checkpointing and `fully_shard`. sequence: cut the tokens of norms and residuals, too.

    Raises UserError where the model has no plan, or sizes do not divide.
    """
    plan, num_ranks = model.tensor_plan(), mesh.size()
    if plan is None:
        raise UserError(
            f"parallel.tensor: nothing says how ranks cut a model of type {model.facts.family!r}; set it to 1"
        )
    sizes = plan.divided.values()
    for name, size in plan.divided.items():
        if size % num_ranks:
            fitting = [str(n) for n in range(1, num_ranks) if not any(each % n for each in sizes)]
            raise UserError(
                f"parallel.tensor: {num_ranks} ranks do not divide {name}={size}; "
                f"smaller numbers that do: {', '.join(fitting)}"
            )
    cut(model, mesh, {name: STYLES[each.style](each, sequence) for name, each in plan.cuts.items()})


def cut(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Applies `plan` to `model`, in place; tied parameters stay tied.

    Raises UserError for a parameter that no style of the plan takes.
    """
    shared = aliases(model)
    parallelize_module(model, mesh, dict(plan))
    tie(model, shared)  # a style made a new parameter for each name
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"parallel.tensor: the plan has no style for {name}; each parameter needs one")


def describe_mesh(model: nn.Module, world: World) -> str:
    """The mesh as text: `8 x cuda`, its axes if it has several, and how modules gather activations."""
    names = world.mesh.mesh_dim_names or ()
    text = f"{world.size} x {world.device.type}"
    if len(names) > 1:
        text += f" ({' x '.join(f'{name} {world.mesh.size(i)}' for i, name in enumerate(names))})"
    gathers = Counter(getattr(module, "token_gather", "none") for module in model.modules())
    del gathers["none"]
    if gathers:
        shown = ", ".join(f"{count} x {how}" for how, count in sorted(gathers.items()))
        text += f", activations gathered: {shown}"
    return text


def fused_rows(model: nn.Module) -> dict[str, Sequence[int]]:
    """Name of each fused parameter that tensor parallelism cut -> rows of the matrices that it stacks."""
    return {
        f"{name}.{parameter}": module.fused_rows
        for name, module in model.named_modules()
        if hasattr(module, "fused_rows")
        for parameter in module._parameters
    }
