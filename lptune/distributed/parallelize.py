"""`parallelize()`: tensor parallelism, activation checkpointing, compilation, FSDP2, in this order.

    1. tensor parallelism, on whole parameters;
    2. activation checkpointing, so that the compiled code includes the recomputation and the compiler can
       plan it;
    3. compilation of each block's forward, so that FSDP's hooks stay outside the graph and one graph serves
       all blocks of a kind; compilation of a Backbone's head with the objective of a chunk;
    4. wrapping the weights that the precision plan gathers in 8 bits;
    5. `fully_shard`, the root (embeddings, final norm, head) and block by block; on one rank, which has
       nothing to gather, compute weights (linear/weights/compute_weights.py).

The parameters that a Backbone names in `float32_names` are a group of their own, gathered and reduced in
float32: FSDP2 wants one dtype of the gradients that it reduces together. They are few and small, lie in all
blocks, and a hook inside of a block would break its graph. So the group is that of the module which holds
the blocks: one all-gather before them, and one reduce-scatter at the end of backward.

Parameters stay float32 (with int8_weight_only: INT8): they are the master weights. FSDP gathers a block in
the compute dtype or in 8 bits, and sums gradients in float32, which ranks exchange in parallel.reduce_dtype;
compute weights are the same tensors. With optimizer.master=none trained parameters become bfloat16 before all
else, and with them their gradients: FSDP rounds the reduced ones, and on one rank those of micro-batches add
up in bfloat16.
"""

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lptune.base.errors import UserError
from lptune.config import ParallelConfig, RunConfig
from lptune.distributed.compilation import compile_chunk_loss, compile_forward, runs_eagerly, set_options
from lptune.distributed.expert_parallel import expert_weights, share_experts
from lptune.distributed.session import World
from lptune.distributed.tensor_parallel import cut, cut_backbone
from lptune.hardware.planned import planned
from lptune.linear import (
    ComputeWeights,
    LowPrecision,
    gather_in_8_bits,
    note_group,
    reduce_narrowly,
    use_compute_weights,
)
from lptune.models import Backbone

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The settings of `parallelize` alone, for your own loop without a RunConfig."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute_dtype: str = "bfloat16"
    compile: str = "block"
    activation_checkpointing: str = "none"


Settings = RunConfig | Execution
"""What `parallelize` reads."""


def parallelize(
    model: nn.Module,
    world: World,
    cfg: Settings,
    *,
    blocks: Sequence[nn.Module] | None = None,
    plan: Mapping[str, ParallelStyle] | None = None,
) -> None:
    """Cuts, checkpoints, compiles and shards `model`, usually on meta, in place.

    Every rank calls it with the same model. Afterwards parameters are DTensors, cut over the mesh axis
    `tensor`, then sharded by rows over `fsdp`, and equal on all ranks of `replicate` (HSDP). On one rank they
    stay plain tensors (`uses_fsdp`).

    For a Backbone that is all. For any other module, blocks: the modules to gather, compile and recompute one
    by one; plan: for tensor parallelism, module name or glob -> style. Raises UserError if the
    mesh does not divide the model.
    """
    backbone = model if isinstance(model, Backbone) else None
    if backbone is not None:
        parallel = cfg.parallel
        backbone.facts.check_execution(parallel.tensor, cfg.compile, parallel.context, parallel.expert)
        backbone.group = world.context
    elif world.experts is not None:
        raise UserError(
            "parallelize: parallel.expert needs a models.Backbone, which says where experts are; set it to "
            "1 for any other module"
        )
    elif world.context is not None:
        raise UserError(
            "parallelize: parallel.context shares rows among ranks, which a models.Backbone knows how to "
            "compute; set it to 1 for any other module"
        )
    compute_dtype = getattr(torch, cfg.compute_dtype)
    names = frozenset[str]()
    if backbone is not None and compute_dtype != torch.float32:
        names = backbone.float32_names
    if isinstance(cfg, RunConfig) and cfg.optimizer.master == "none":
        for name, parameter in model.named_parameters():
            # All that are trained: FSDP wants one dtype of the trained parameters that it gathers together.
            if parameter.requires_grad and name not in names:
                parameter.data = parameter.data.to(torch.bfloat16)
    if world.tensor_mesh is not None or world.experts is not None:
        # torch would warn at every export that it gathers over two axes in turn, which is necessary.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if world.tensor_mesh is not None:
        if backbone is not None:
            cut_backbone(backbone, world.tensor_mesh, cfg.parallel.sequence)
        elif plan is None:
            raise UserError(
                "parallelize: parallel.tensor needs a plan for this model, see docs/distributed.md"
            )
        else:
            cut(model, world.tensor_mesh, plan)
    if world.experts is not None:
        assert backbone is not None
        share_experts(backbone, world)
    each: list[Any] = list(backbone.blocks if backbone is not None else blocks or ())
    mode = cfg.activation_checkpointing
    if mode == "full" and cfg.compile != "none" and world.tensor_mesh is not None:
        # If attention is recomputed, torch 2.13 saves its random state (used or not) in the wrong place among
        # the values that a compiled graph keeps for backward: next to the mesh of a DTensor.
        mode = "full but attention"
    elif mode == "full" and cfg.compile != "none":
        mode = "full, compiled"
    # A Backbone draws nothing, but a copy of a recipe may add dropout, whose masks the compiler keeps itself.
    keeps = backbone is None or cfg.compile == "none"
    # torch compiles no part of a recomputed function that breaks the graph. So what is around a mixer is
    # compiled first, and recomputed as it is.
    broken = [block for block in each if any(map(runs_eagerly, block.modules()))]
    outside = broken if mode == "full, compiled" and cfg.compile == "block" else []
    inside = [block for block in each if block not in outside]
    checkpoint_activations(inside, mode, keeps_random_state=keeps)
    # Blocks compile without graph breaks, but for mixers of recurrent models. In a whole model, FSDP's hooks
    # on the blocks break the graph.
    by_block = cfg.compile == "block"
    if cfg.compile != "none":
        shares = backbone is not None and backbone.facts.shares_between_blocks
        set_options(has_dtensors=world.tensor_mesh is not None, has_side_effects=shares)
        world.compile_watch.start(world.is_main)
        has_experts = any(hasattr(m, "num_groups") and not hasattr(m, "spec") for m in model.modules())
        if has_experts and world.experts is None and compute_dtype != torch.bfloat16:
            raise UserError(
                "compile: torch compiles experts in high precision in bfloat16 alone; set compile=none, or "
                "compute_dtype=bfloat16"
            )
    compile_forward(each if by_block else [model], cfg.compile, fullgraph=by_block)
    for block in outside:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=keeps
        )
    if by_block and backbone is not None:
        compile_chunk_loss(backbone.chunk_loss)
    gather_in_8_bits(model, compute_dtype)
    forward_methods = ("hidden_states",) if backbone is not None else ()
    if not uses_fsdp(cfg.parallel, world.size):
        use_compute_weights(model, compute_dtype, world.mesh, forward_methods, names)
        return
    # One rank has nothing to sum: a copy of its gradients in float32 would have the same values.
    alone = world.token_size == 1 and cfg.parallel.reduce_every_micro_batch
    # Masks, positions and rope tables pass through blocks; only weights decide the compute dtype.
    policy: Any = functools.partial(
        MixedPrecisionPolicy, reduce_dtype=None if alone else torch.float32, cast_forward_inputs=False
    )
    shard: dict[str, Any] = {"mesh": world.data_mesh, "mp_policy": policy(param_dtype=compute_dtype)}
    if cfg.parallel.cpu_offload:
        shard["offload_policy"] = CPUOffloadPolicy(pin_memory=planned() is None)  # nothing pins fake tensors
    # From the outside in, since FSDP does not look into modules of another group; so each call is told which
    # parameters are not its own.
    in_float32 = {model.get_parameter(name) for name in names}
    in_blocks = {parameter for block in each for parameter in block.parameters()}
    of_embedding = _untied_embedding(backbone) if cfg.parallel.cpu_offload else set()
    # The root's weights are used last in forward and first in backward: freeing them in between would
    # gather them twice.
    others = in_blocks | of_embedding | in_float32
    fully_shard(model, **shard, reshard_after_forward=False, ignored_params=others)
    narrow = getattr(torch, cfg.parallel.reduce_dtype) if cfg.parallel.reduce_dtype != "float32" else None
    if narrow is not None:
        reduce_narrowly(model, "", narrow)
    if in_float32:
        assert backbone is not None
        ((inside, holder),) = (
            found for found in model.named_modules() if backbone.blocks in list(found[1].children())
        )
        others = {parameter for parameter in holder.parameters() if parameter not in in_float32}
        in_its_dtype = shard | {"mp_policy": policy(param_dtype=torch.float32)}
        fully_shard(holder, **in_its_dtype, reshard_after_forward=False, ignored_params=others)
        in_float32 = {model.get_parameter(name) for name in names}  # others than before
        note_group(holder, (name.removeprefix(f"{inside}.") for name in names), in_float32=True)
    if backbone is not None and of_embedding:
        # Embedding and head are the largest matrices: they need not be gathered, nor their gradients be
        # reduced, together. Backward of an embedding does not read it.
        embedding: Any = backbone.embedding
        fully_shard(embedding, **shard, ignored_params=in_float32)
        if isinstance(embedding, nn.Embedding):
            cast(FSDPModule, embedding).set_unshard_in_backward(False)
        if narrow is not None:
            reduce_narrowly(embedding, "embedding", narrow)
    reshards = cfg.parallel.reshards(world.size)
    mixtures = [_mixtures_of_own_experts(block) for block in each]
    for number, (block, inside_it) in enumerate(zip(each, mixtures, strict=True)):
        own = {weight for mixture in inside_it for weight in expert_weights(mixture).values()}
        fully_shard(block, **shard, reshard_after_forward=reshards, ignored_params=in_float32 | own)
        if narrow is not None:
            reduce_narrowly(block, f"block {number}", narrow)
        for mixture in inside_it:
            _shard_experts(mixture, world, shard, reshards)
            if narrow is not None and world.expert_data_mesh["fsdp"].size() > 1:
                reduce_narrowly(mixture, f"experts of block {number}", narrow)
    for name in forward_methods:
        register_fsdp_forward_method(model, name)
    prefetch(each, cfg.parallel.prefetch_blocks, mixtures)


def _mixtures_of_own_experts(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if hasattr(module, "exchange")]


def _shard_experts(mixture: nn.Module, world: World, shard: Mapping[str, Any], reshards: bool) -> None:
    """Makes the experts of `mixture` a group of their own, over the ranks that have the same ones."""
    own = expert_weights(mixture)
    others = set(mixture.parameters()) - set(own.values())
    on_mesh = {**shard, "mesh": world.expert_data_mesh}
    fully_shard(mixture, **on_mesh, reshard_after_forward=reshards, ignored_params=others)
    note_group(mixture, own, in_float32=False)
    sharded: Any = mixture
    sharded.set_gradient_divide_factor(float(world.token_size))
    # Gloo has no operation that scales while it sums. Without a collective FSDP would divide twice.
    sharded.set_force_sum_reduction_for_comms(world.expert_data_mesh["fsdp"].size() > 1)


def _untied_embedding(backbone: Backbone | None) -> set[nn.Parameter]:
    """The parameters of the embedding, unless the head has them as well."""
    if backbone is None or set(backbone.embedding.parameters()) & set(backbone.head.parameters()):
        return set()
    return set(backbone.embedding.parameters())


def uses_fsdp(parallel: ParallelConfig, num_ranks: int) -> bool:
    """Whether `parallelize` shards by FSDP2. On one rank it does so only where that saves memory: to free
    each block's weights after forward (reshard_after_forward=true), or to keep them in host memory.
    """
    return num_ranks > 1 or parallel.cpu_offload or parallel.reshards(num_ranks)


def prefetch(
    blocks: Sequence[FSDPModule], num_blocks: int, inside: Sequence[Sequence[Any]] | None = None
) -> None:
    """Makes each block start the gathers of the next `num_blocks` blocks, in forward and (in reverse order)
    in backward. blocks: in the order of forward. inside: of each, the modules with a gather of their own,
    which it starts too. 0 keeps FSDP2's own order.
    """
    if num_blocks == 0:
        return
    parts = [[block, *own] for block, own in zip(blocks, inside or [()] * len(blocks), strict=True)]
    for i, (block, *own) in enumerate(parts):
        after, before = parts[i + 1 : i + 1 + num_blocks], parts[max(0, i - num_blocks) : i][::-1]
        block.set_modules_to_forward_prefetch([*own, *itertools.chain(*after)])
        block.set_modules_to_backward_prefetch([*own, *itertools.chain(*before)])


def materialize(model: Backbone, world: World, cfg: Settings) -> None:
    """Allocates the parameters of a model on meta, with unspecified values, and computes its buffers."""
    model.to_empty(device="cpu" if cfg.parallel.cpu_offload else world.device)
    model.reset_buffers(world.device)


def sync_gradients(model: nn.Module, is_last: bool, *, each: bool = False) -> None:
    """Sets whether the next backward reduces gradients over ranks: in the last micro-batch, or with `each` in
    every one. Gradients of replicas (HSDP) are reduced in the last micro-batch only. On one rank: whether an
    update may follow the next backward, so that masters are copied again.
    """
    if (weights := ComputeWeights.of(model)) is not None:
        weights.keep = not is_last
        return
    assert isinstance(model, FSDPModule), "parallelize() comes first"
    model.set_requires_gradient_sync(is_last or each)
    model.set_requires_all_reduce(is_last)


def accumulate(
    model: nn.Module, batches: Sequence[BatchT], world: World, cfg: Settings, low: LowPrecision
) -> Iterator[BatchT]:
    """Yields the micro-batches of this rank in a step. The caller runs forward and backward for each.

    Gradients add up on this rank. They are reduced over ranks after the last micro-batch, or after each with
    `parallel.reduce_every_micro_batch`. low: gets the number of each micro-batch within the global batch, on
    which its random bits depend; `data.Loader` deals micro-batches out to ranks in this order. Ranks that
    share rows have numbers of their own, as their tokens differ.
    """
    for number, batch in enumerate(batches):
        low.micro_batch(world.token_rank * len(batches) + number)
        is_last = number == len(batches) - 1
        sync_gradients(model, is_last, each=cfg.parallel.reduce_every_micro_batch)
        yield batch


@contextmanager
def keep_compute_weights(model: nn.Module) -> Iterator[None]:
    """Within it, no update follows a backward, so on one rank masters are not copied again after it."""
    weights = ComputeWeights.of(model)
    if weights is None:
        yield
        return
    weights.keep, before = True, weights.keep
    try:
        yield
    finally:
        weights.keep = before


def reshard(model: nn.Module) -> None:
    """Frees gathered weights, so that `model.parameters()` are the sharded ones; on one rank, the masters.

    After a forward without a backward (an evaluation), FSDP leaves the gathered weights of modules that do
    not reshard after forward. Code that reads parameters by name calls this first.
    """
    for module in model.modules():
        if (weights := ComputeWeights.of(module)) is not None:
            weights.take_out()
        if isinstance(module, FSDPModule):
            module.reshard()


def checkpoint_activations(
    blocks: Iterable[nn.Module], mode: str, *, keeps_random_state: bool = False
) -> None:
    """Makes backward recompute the forward of `blocks`, in place. Call it before `compile_forward`.

    mode: `full` recomputes all (`full, compiled` is the same for the compiler), `full but attention` all but
    attention, `selective` all but GEMMs, attention and sums over ranks, `none` nothing. keeps_random_state:
    recompute with the random numbers of forward, for blocks with dropout.
    """
    if mode == "none":
        return
    for block in blocks:
        cls: Any = block.__class__
        block.__class__ = _checkpointed(cls, mode, keeps_random_state)
    if mode != "full":
        # It warns "Make sure the checkpointed region does not contain in-place ops". There are none here, and
        # a user cannot act on it.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


@functools.cache
def _checkpointed(cls: Any, mode: str, keeps_random_state: bool) -> type[nn.Module]:
    """A subclass of `cls` with a checkpointed forward. A wrapper module would change parameter names."""

    contexts = {
        "selective": _selective_contexts,
        "full but attention": _attention_contexts,
        "full, compiled": _no_contexts,
    }.get(mode)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keeps_random_state}
        if contexts is not None:
            options["context_fn"] = contexts
        return checkpoint(functools.partial(cls.forward, self), *args, **options, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_keep, _expensive_ops()))


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_keep, _attention_ops()))


def _no_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_keep, frozenset()))


# AOTAutograd keeps what it has compiled on disk, and does not see in a graph which outputs a context function
# keeps. It takes a graph from there only if the function names itself. A change of this file is another name.
_digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
for _contexts in (_selective_contexts, _attention_contexts, _no_contexts):
    vars(_contexts)["cache_hash"] = f"{_contexts.__name__} {_digest}"


@functools.cache
def _expensive_ops() -> frozenset[Any]:
    """The ops whose outputs selective checkpointing keeps: GEMMs, attention, and sums over ranks."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    return _attention_ops() | {
        # Sums are kept. Gathers are repeated: keeping them would undo what sequence parallelism saves.
        functional.reduce_scatter_tensor.default,
        functional.all_reduce.default,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        torch.ops.lptune.scaled_mm.default,
        torch.ops.lptune.block_scaled_mm.default,
        torch.ops.lptune.nvfp4_mm.default,
        torch.ops.lptune.weight_only_mm.default,
        torch.ops.lptune.int4_weight_mm.default,
        torch.ops.lptune.grouped_mm.default,
        torch.ops.lptune.grouped_outer.default,
        aten._grouped_mm.default,
    }


@functools.cache
def _attention_ops() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            torch.ops.lptune.document_attention.default,
            *_varlen_ops(),
        }
    )


def _varlen_ops() -> list[Any]:
    try:
        import torch.nn.attention.varlen  # registers the op

        return [torch.ops.torch_attn._varlen_attn.default]
    except (ImportError, AttributeError):
        return []


def _keep(kept: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Not PREFER_RECOMPUTE, which the compiler also assumes without a context function. With it torch 2.11
    # keeps the outputs of two 8-bit GEMMs of a block, and all transposed weights: 8B did not fit an H200.
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.MUST_RECOMPUTE
