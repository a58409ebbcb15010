"""Ranks, meshes, and how a model is spread over them."""

from lptune.distributed.parallelize import parallelize, reshard, sync_gradients
from lptune.distributed.session import World, session

__all__ = ["World", "parallelize", "reshard", "session", "sync_gradients"]
