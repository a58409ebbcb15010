"""Tensor and sequence parallelism: each matrix of a model is cut over the ranks of the mesh axis `tensor`.

Megatron's scheme (arXiv:1909.08053, 2205.05198): q, k, v, gate and up are cut by output features, so that
each rank has whole heads and its share of the MLP; o and down are cut by input features. Each such pair needs
two collectives, one before and one after (activation_collectives.py). With sequence parallelism, norms and
residuals are cut by tokens, and both collectives run in forward and in backward. Without it, the one before
only sums gradients in backward, and the one after only sums outputs in forward. The vocabulary is cut in the
embedding, the head and the loss; its size need not divide.

A model says in `tensor_plan` which module is cut how (`STYLES`). For a module that is no Backbone, write a
style plan (docs/distributed.md), which `parallelize_module` of torch applies:

    plan = {
        "layers.*.wq": ColumnParallel(), "layers.*.wo": RowParallel(sequence), …
        "layers.*.attention": GatheredInput(sequence), "layers.*.norm": Replicated(sequence), …
    }
    parallelize_module(model, mesh["tensor"], plan)

Parameters become DTensors over that axis. Activations stay plain tensors that hold this rank's part:
autograd functions, attention and the compiler need no DTensor. Weights may be on meta, or equal on all ranks.
`linear.convert` may have converted the layers before.

In torch's own styles activations are DTensors, too. The styles here differ in three ways. A low-precision
layer multiplies local tensors, with the scales of its own part. q, k and v share one 8-bit gather. A fused
projection can be cut.
"""

import functools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lptune.base.errors import UserError
from lptune.distributed.activation_collectives import (
    RankWords,
    copy_tokens,
    first_word,
    gather_tokens,
    gather_tokens_low,
    gather_words,
    scatter_tokens,
    sum_tokens,
)
from lptune.distributed.session import World
from lptune.distributed.shards import row_runs
from lptune.kernels import PART
from lptune.linear import LinearSpec, LowPrecisionLinear, RowTensor, check_part, local_part
from lptune.models import Backbone, Group, RMSNorm, aliases, tie
from lptune.models.backbone import Cut


class _Style(ParallelStyle):
    """A style that gives a module's parameters their placement and its class another forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply(module, device_mesh, Group.of(device_mesh.get_group()))
        return module

    @abstractmethod
    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        """Replaces parameters and forward of `module`, in place."""


class ColumnParallel(_Style):
    """A linear layer cut by output features: all tokens in, this rank's features out.

    fused_rows: output features of the layers that this one fuses (q, k, v), each of which is cut by itself.
    The rows of such a parameter are in the order of the mesh, for tools of torch, too; checkpoints of this
    library and `distributed.full_tensor` put them back.
    """

    def __init__(self, fused_rows: Sequence[int] = ()) -> None:
        self.fused_rows = tuple(fused_rows)

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        _check_linear(module)
        uneven = any(rows % group.size for rows in self.fused_rows)
        if self.fused_rows and (uneven or sum(self.fused_rows) != module.out_features):
            raise UserError(
                f"parallel.tensor: fused_rows={self.fused_rows} must add up to {module.out_features} output "
                f"features and each divide among {group.size} ranks"
            )
        _cut(module, "weight", mesh, Shard(0), self.fused_rows)
        _cut(module, "bias", mesh, Shard(0), self.fused_rows)
        if self.fused_rows:
            module.fused_rows = self.fused_rows
        _check_sizes(module, group)
        if isinstance(module, LowPrecisionLinear):
            module.handle[PART] = group.rank
            low: Any = module
            low.__class__ = _of_parts(low.__class__)
        else:
            module.__class__ = _LocalLinear


class RowParallel(_Style):
    """A linear layer cut by input features; the outputs of the ranks are summed.

    sequence: reduce-scatter, so that each rank gets the sums of its own tokens; otherwise all-reduce.
    """

    def __init__(self, sequence: bool = True) -> None:
        self.sequence = sequence

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        _check_linear(module)
        _cut(module, "weight", mesh, Shard(1))
        _cut(module, "bias", mesh, Replicate())
        _check_sizes(module, group)
        if not isinstance(module, LowPrecisionLinear):
            module.__class__ = _LocalLinear
        module.__class__ = _row_parallel(module.__class__, self.sequence, group)


class GatheredInput(_Style):
    """A module whose column-parallel layers all take its first argument, which is gathered once for all.

    In a style plan it comes after these layers. The gather moves 8 bits if all layers allow it
    (precision.tp_all_gather).
    """

    def __init__(self, sequence: bool = True) -> None:
        self.sequence = sequence

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        columns = [each for each in module.modules() if _is_column(each)]
        if not columns:
            raise UserError(
                f"parallel.tensor: {type(module).__name__} has no column-parallel layer yet; GatheredInput "
                "comes after them in a plan"
            )
        specs = {each.spec if isinstance(each, LowPrecisionLinear) else None for each in columns}
        spec = next(iter(specs)) if len(specs) == 1 else None
        low = spec if self.sequence and spec is not None and spec.token_gather != "high" else None
        if low is None and any(each is not None and each.token_gather == "low" for each in specs):
            why = (
                "layers that share an input differ"
                if self.sequence
                else "parallel.sequence=false gathers none"
            )
            raise UserError(
                f"precision.tp_all_gather: low is not possible, {why}; set it to auto, or mend that"
            )
        module.token_gather = low.described_tokens if low else "high" if self.sequence else "none"
        module.__class__ = _gathered_input(module.__class__, self.sequence, group, low)


class GatheredOutput(_Style):
    """A module whose output is gathered, since a column-parallel layer follows: the model before its head."""

    def __init__(self, sequence: bool = True) -> None:
        self.sequence = sequence

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        module.token_gather = "high" if self.sequence else "none"
        module.__class__ = _gathered_output(module.__class__, self.sequence, group)


class Replicated(_Style):
    """A norm whose parameters are replicated.

    partial: ranks have different tokens or features, so the gradient of a parameter is the sum over ranks.
    """

    def __init__(self, partial: bool = True) -> None:
        self.partial = partial

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        cls: Any = module.__class__
        if not issubclass(cls, (RMSNorm, nn.LayerNorm, nn.RMSNorm)):
            raise UserError(
                f"parallel.tensor: {type(module).__name__} is no RMSNorm or LayerNorm, and only those are "
                "replicated"
            )
        for name in list(module._parameters):
            _cut(module, name, mesh, Replicate())
        module.__class__ = _replicated(cls, self.partial)


class FeatureParallelNorm(_Style):
    """An RMSNorm over features that a column-parallel layer has cut: squares are summed over ranks."""

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        _cut(module, "weight", mesh, Shard(0))
        module.__class__ = _feature_parallel(group)


class VocabParallelEmbedding(_Style):
    """An embedding cut by words.

    sequence: each rank gets the embeddings of its own tokens; otherwise of all tokens.
    """

    def __init__(self, sequence: bool = True) -> None:
        self.sequence = sequence

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
            raise UserError(
                "parallel.tensor: an embedding with padding_idx, max_norm or scale_grad_by_freq cannot be cut"
            )
        if first_word(module.num_embeddings, group._replace(rank=group.size - 1)) >= module.num_embeddings:
            raise UserError(
                f"parallel.tensor: {module.num_embeddings} words leave some of {group.size} ranks without any"
            )
        _cut(module, "weight", mesh, Shard(0))
        module.__class__ = _vocab_parallel(first_word(module.num_embeddings, group), self.sequence, group)


class WordParallelHead(ColumnParallel):
    """A head cut by words: all tokens in, the logits of this rank's words out; its `words` say which they are
    (lptune/models/words.py). For a Backbone, whose objectives take such logits.
    """

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        super().apply(module, mesh, group)
        module.words = RankWords(module.out_features, group)


class VocabParallelHead(ColumnParallel):
    """A head that gathers its input and its logits: for a loss that needs the logits of all words."""

    def __init__(self, sequence: bool = True) -> None:
        super().__init__()
        self.sequence = sequence

    def apply(self, module: Any, mesh: DeviceMesh, group: Group) -> None:
        super().apply(module, mesh, group)
        module.token_gather = "high" if self.sequence else "none"
        logits: Any = _gathered_logits(module.__class__, group, module.out_features)
        module.__class__ = _gathered_input(logits, self.sequence, group, None)


class _LocalLinear(nn.Linear):
    """A linear layer in compute dtype that multiplies by this rank's part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_part(self.weight), None if self.bias is None else local_part(self.bias))

    def multiply(self, x: Tensor) -> Tensor:
        """`forward` without the bias."""
        return F.linear(x, local_part(self.weight))


# Subclasses instead of hooks. A forward hook runs after the bias was added, and the bias must be added once,
# after the sum over ranks. Hooks would also be different closures for each layer, and blocks must be equal to
# share a compiled graph. One subclass serves all layers of a kind.
def _subclass(cls: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@functools.cache
def _of_parts(cls: Any) -> type[nn.Module]:
    """A LowPrecisionLinear whose input is a plain tensor; under torch's own styles it is a DTensor."""
    return _subclass(cls, cls.forward_part)


@functools.cache
def _row_parallel(cls: Any, sequence: bool, group: Group) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.multiply(x)
        out = scatter_tokens(out, group) if sequence else sum_tokens(out, group)
        if self.bias is None:
            return out
        return out + local_part(self.bias, sums_gradient=sequence).to(out.dtype)

    return _subclass(cls, forward)


@functools.cache
def _gathered_input(cls: Any, sequence: bool, group: Group, low: LinearSpec | None) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if low is not None:
            return cls.forward(self, gather_tokens_low(x, low, group), *args, **kwargs)
        gathered = gather_tokens(x, group) if sequence else copy_tokens(x, group)
        return cls.forward(self, gathered, *args, **kwargs)

    return _subclass(cls, forward)


@functools.cache
def _gathered_output(cls: Any, sequence: bool, group: Group) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = cls.forward(self, *args, **kwargs)
        return gather_tokens(out, group) if sequence else copy_tokens(out, group)

    return _subclass(cls, forward)


@functools.cache
def _gathered_logits(cls: Any, group: Group, vocab_size: int) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return gather_words(cls.forward(self, *args, **kwargs), group, vocab_size)

    return _subclass(cls, forward)


@functools.cache
def _replicated(cls: Any, partial: bool) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        local = {
            name: local_part(parameter, sums_gradient=partial)
            for name, parameter in self._parameters.items()
            if parameter is not None
        }
        if issubclass(cls, RMSNorm):
            normed: Tensor = self.normalize(x, **local)
        elif issubclass(cls, nn.LayerNorm):
            normed = F.layer_norm(x, self.normalized_shape, eps=self.eps, **local)
        else:
            normed = F.rms_norm(x, self.normalized_shape, eps=self.eps, **local)
        return normed

    return _subclass(cls, forward)


@functools.cache
def _feature_parallel(group: Group) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        x32, weight = x.float(), local_part(self.weight).float()
        squares = sum_tokens(x32.square().sum(dim=-1, keepdim=True), group)
        # Each rank uses the sum for its own features, so the gradient of the sum is also summed over ranks.
        mean = copy_tokens(squares, group) / self.weight.shape[0]
        return (x32 * torch.rsqrt(mean + self.eps) * (weight + 1.0 if self.adds_one else weight)).to(x.dtype)

    return _subclass(RMSNorm, forward)


@functools.cache
def _vocab_parallel(first_word: int, sequence: bool, group: Group) -> type[nn.Module]:
    def forward(self: Any, tokens_BS: Tensor) -> Tensor:
        weight = local_part(self.weight)
        here_BS = (tokens_BS >= first_word) & (tokens_BS < first_word + weight.shape[0])
        found = F.embedding(torch.where(here_BS, tokens_BS - first_word, 0), weight)
        mine = torch.where(here_BS[..., None], found, 0.0)
        return scatter_tokens(mine, group) if sequence else sum_tokens(mine, group)

    return _subclass(nn.Embedding, forward)


def _is_column(module: nn.Module) -> bool:
    weight: Any = module._parameters.get("weight")
    return isinstance(module, nn.Linear) and isinstance(weight, DTensor) and weight.placements == (Shard(0),)


def _cut(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, fused: Sequence[int] = ()
) -> None:
    """Replaces the parameter `name` of `module`, if it exists, by a DTensor that holds this rank's part."""
    old = module._parameters.get(name)
    if old is None or isinstance(old, DTensor):
        return
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    whole, part = old.detach(), old.detach()
    if isinstance(placement, Shard):
        size = whole.shape[placement.dim]
        chunk = -(-size // num_ranks)
        start = min(chunk * rank, size)
        runs = row_runs(start, min(chunk, size - start), fused, num_ranks)
        part = _take(whole, placement.dim, runs)
    sharded = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=old.requires_grad))


def cut_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces the weight of `layer` by a DTensor that holds this rank's rows."""
    _cut(layer, "weight", mesh, Shard(0))


def _take(tensor: Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    """A copy of the runs (first, number) of `tensor` along `dim`, one after the other."""
    if not isinstance(tensor, RowTensor):
        return torch.cat([tensor.narrow(dim, first, number) for first, number in runs], dim=dim)
    # A part with one column has one number for each row, which belongs to all columns: it is not cut.
    parts = [
        part.clone() if dim == 1 and part.shape[1] == 1 else _take(part, dim, runs) for part in tensor.parts()
    ]
    taken = tensor.rebuilt(parts)
    taken.full_rows = parts[0].shape[0]
    return taken


def _check_linear(module: nn.Module) -> None:
    if type(module) is not nn.Linear and not isinstance(module, LowPrecisionLinear):
        raise UserError(
            f"parallel.tensor: {type(module).__name__} is no nn.Linear, which alone is cut by columns or rows"
        )


def _check_sizes(module: nn.Linear, group: Group) -> None:
    if isinstance(module, LowPrecisionLinear):
        whole = (module.out_features, module.in_features)
        check_part(local_part(module.weight.detach()), whole, group.size, module.spec.kind.weight_group)


# ---- a whole model


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


_DIMS = {"columns": 0, "rows": 1, "norm over features": 0, "embedding": 0, "head": 0}
"""Style -> the dimension of the weight that ranks cut, and of the bias if it is 0; others cut nothing."""


def cut_dims(model: Backbone) -> dict[str, int]:
    """Name of a parameter -> the dimension that `cut_backbone` would cut. model: not cut yet."""
    return {
        f"{name}.{leaf}": dim
        for name, each in _planned_cuts(model)
        if (dim := _DIMS.get(each.style)) is not None
        for leaf in ("weight", "bias")[: 2 - dim]
    }


def planned_fused_rows(model: Backbone) -> dict[str, tuple[int, ...]]:
    """Name of each fused weight that `cut_backbone` would cut -> rows of the matrices that it stacks."""
    return {f"{name}.weight": each.fused_rows for name, each in _planned_cuts(model) if each.fused_rows}


def _planned_cuts(model: Backbone) -> Iterator[tuple[str, Cut]]:
    plan = model.tensor_plan()
    for pattern, each in plan.cuts.items() if plan is not None else ():
        glob = re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))  # no * stands for several names
        yield from ((name, each) for name, _ in model.named_modules() if glob.fullmatch(name))


def describe_mesh(model: nn.Module, world: World) -> str:
    """The mesh as text: `8 x cuda`, its axes if it has several, and how modules gather activations."""
    names = world.mesh.mesh_dim_names or ()
    text = f"{world.size} x {world.device.type}"
    if len(names) > 1:
        text += f" ({' x '.join(f'{name} {world.mesh.size(i)}' for i, name in enumerate(names))})"
    if world.context is not None:
        text += f", each row on {world.context.size} of them"
    if world.experts is not None:
        text += f", experts on {world.experts.group.size} of them"
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
