"""Ranks, meshes, and how a model is spread over them.

session.py                  the process group of a run, its device and its mesh
side_group.py               a second process group, for work that waits for disks
compilation.py              torch.compile: its time and its caches
parallelize.py              the order: tensor parallelism, checkpointing, compilation, FSDP2 (not on one rank)
tensor_parallel.py          how a module and a model are cut over the axis `tensor`
activation_collectives.py   the collectives on activations, each with its gradient
same_products.py            does every rank multiply alike? before a run and each checkpoint
shards.py                   which part of a tensor this rank holds
collective_counts.py        counts the collectives that execute; compares those of a first step with the plan
"""

from lptune.config import mesh_axes
from lptune.distributed.collective_counts import (
    Collectives,
    axis_names,
    describe_collective,
    record_collectives,
    verify_collectives,
)
from lptune.distributed.compilation import CompileWatch, check_compiler, compile_forward
from lptune.distributed.parallelize import (
    Execution,
    accumulate,
    checkpoint_activations,
    keep_compute_weights,
    materialize,
    parallelize,
    reshard,
    sync_gradients,
    uses_fsdp,
)
from lptune.distributed.same_products import check_products
from lptune.distributed.session import Experts, World, destroy_process_group, neighbours, session
from lptune.distributed.shards import (
    Piece,
    blocks_are_whole,
    first_column,
    full_tensor,
    is_first_holder,
    local_pieces,
    local_rows,
    whole_piece,
    zeros_by_blocks,
    zeros_by_rows,
)
from lptune.distributed.side_group import SideGroup, machine_first, side_group
from lptune.distributed.tensor_parallel import (
    ColumnParallel,
    FeatureParallelNorm,
    GatheredInput,
    GatheredOutput,
    Replicated,
    RowParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    WordParallelHead,
    cut_dims,
    describe_mesh,
    fused_rows,
    planned_fused_rows,
)
from lptune.linear import on_this_rank

__all__ = [
    "Collectives",
    "ColumnParallel",
    "CompileWatch",
    "Execution",
    "Experts",
    "FeatureParallelNorm",
    "GatheredInput",
    "GatheredOutput",
    "Piece",
    "Replicated",
    "RowParallel",
    "SideGroup",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "WordParallelHead",
    "World",
    "accumulate",
    "axis_names",
    "blocks_are_whole",
    "check_compiler",
    "check_products",
    "checkpoint_activations",
    "compile_forward",
    "cut_dims",
    "describe_collective",
    "describe_mesh",
    "destroy_process_group",
    "first_column",
    "full_tensor",
    "fused_rows",
    "is_first_holder",
    "keep_compute_weights",
    "local_pieces",
    "local_rows",
    "machine_first",
    "on_this_rank",
    "materialize",
    "neighbours",
    "mesh_axes",
    "parallelize",
    "planned_fused_rows",
    "record_collectives",
    "reshard",
    "session",
    "side_group",
    "sync_gradients",
    "uses_fsdp",
    "verify_collectives",
    "whole_piece",
    "zeros_by_blocks",
    "zeros_by_rows",
]
