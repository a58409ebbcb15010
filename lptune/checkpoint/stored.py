"""What a checkpoint stores, by name: parameters, both AdamW moments beside them, scales of INT8 weights.

    model.norm.weight                    float32
    exp_avg/NAME, exp_avg_sq/NAME        float32, of parameters that were ever updated
    int8_scale/NAME                      of weights that are stored in INT8

Every tensor is named after its parameter and lies in files by rectangles of the whole (manifest.Shard), so
that nothing of a precision, a mesh or a number of ranks is in it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lptune.checkpoint.manifest import Shard
from lptune.distributed import Piece
from lptune.linear import int8_rows, row_scales

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "int8_scale"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name."""
    return dict(model.named_parameters())


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments of the parameters that have any, by name."""
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def int8_scales(model: nn.Module) -> dict[str, Tensor]:
    """Beside weights that are stored in INT8. Not needed to load them, but to load them bit for bit."""
    return {
        f"{SCALE}/{name}": row_scales(parameter)
        for name, parameter in model.named_parameters()
        if int8_rows(parameter) is not None
    }


def fused_rows_of(fused: Mapping[str, Sequence[int]], key: str) -> Sequence[int]:
    """`fused_rows` of the parameter that `key` belongs to: its own name, or `exp_avg/NAME`."""
    return fused.get(key.rpartition("/")[2], ())


def as_shard(file: str, piece: Piece) -> Shard:
    """Where `file` holds `piece`, as the manifest says it."""
    rows, columns = (*piece.values.shape, 1, 1)[:2]
    return Shard(file, piece.row, rows, piece.column, columns, piece.at)
