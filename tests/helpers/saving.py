"""Training and saving in one line each, for tests."""

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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps `first` to `last` of a model whose output is its loss, on rows that are functions of the step."""
    width = next(model.parameters()).shape[-1]
    for step in range(first, last):
        x_TK = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        # The same rows on all ranks: FSDP's mean of their gradients is each of them, on any number of ranks.
        model(x_TK).backward()
        optimizer.step()
        optimizer.zero_grad()
