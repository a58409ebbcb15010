"""Ranks, meshes, and how a model is spread over them."""

from lptune.distributed.parallelize import (
    check_compiler,
    checkpoint_activations,
    compile_forward,
    parallelize,
    reshard,
    sync_gradients,
)
from lptune.distributed.session import World, session
from lptune.distributed.shards import local_rows

__all__ = [
    "World",
    "check_compiler",
    "checkpoint_activations",
    "compile_forward",
    "local_rows",
    "parallelize",
    "reshard",
    "session",
    "sync_gradients",
]
