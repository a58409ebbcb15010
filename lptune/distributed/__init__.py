"""Ranks, meshes, and how a model is spread over them."""

from lptune.distributed.parallelize import (
    Execution,
    Settings,
    check_compiler,
    checkpoint_activations,
    compile_forward,
    materialize,
    parallelize,
    reshard,
    sync_gradients,
)
from lptune.distributed.session import World, session
from lptune.distributed.shards import (
    Piece,
    first_column,
    full_tensor,
    is_first_holder,
    local_pieces,
    local_rows,
)
from lptune.distributed.styles import (
    ColumnParallel,
    FeatureParallelNorm,
    GatheredInput,
    GatheredOutput,
    Replicated,
    RowParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lptune.distributed.tensor_parallel import fused_rows

__all__ = [
    "ColumnParallel",
    "Execution",
    "FeatureParallelNorm",
    "GatheredInput",
    "GatheredOutput",
    "Piece",
    "Replicated",
    "RowParallel",
    "Settings",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "World",
    "check_compiler",
    "checkpoint_activations",
    "compile_forward",
    "first_column",
    "full_tensor",
    "fused_rows",
    "is_first_holder",
    "local_pieces",
    "local_rows",
    "materialize",
    "parallelize",
    "reshard",
    "session",
    "sync_gradients",
]
