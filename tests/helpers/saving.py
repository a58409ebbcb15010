"""Saving in one line, for tests."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lptune import checkpoint, distributed
from lptune.config import CheckpointConfig


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: distributed.World,
    **keys: Any,
) -> Path:
    """Publishes a checkpoint of `step` with an empty fingerprint; returns it. keys: of CheckpointConfig."""
    cfg = CheckpointConfig(**({"keep_last": 9} | keys))
    with checkpoint.CheckpointWriter(folder, model, optimizer, world, cfg) as writer:
        writer.save(step, {"fingerprint": {}}, wait=True)
    return folder / f"step-{step:08d}"
