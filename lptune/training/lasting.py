"""The bytes that last on a rank, counted from shapes: no dry run, no ranks, no weights.

Three things stay from step to step, or through most of one, whatever the activations do:

    weights      float32, or bfloat16 (optimizer.master=none), or INT8 with scales (int8_weight_only)
    optimizer    its moments, averages and counts of updates
    gradients    of all parameters from backward to the update; none where backward updates and frees them

Each rank holds its part: tensor parallelism cuts a dimension, FSDP the rows of what is left. Sizes that do
not divide are those of the first rank, which has most. A run that holds more than its device has is refused
before data are read, and `lptune plan` leaves out changes that cannot fit.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.config import RunConfig
from lptune.distributed import cut_dims
from lptune.linear import int8_rows
from lptune.models import Backbone
from lptune.training.moments import BLOCK, storages_of
from lptune.training.muon import matrices


class Lasting(NamedTuple):
    """Bytes on the rank that has most; gradients are those after the last backward, reduced over ranks."""

    weights: int
    optimizer: int
    gradients: int


def lasting(model: Backbone, cfg: RunConfig, num_ranks: int) -> Lasting:
    """What of `model` lasts on one of `num_ranks` ranks, on the device or (parallel.cpu_offload) on the host.

    model: with its frozen parameters, after `linear.convert` and before `parallelize`; a frozen second model
    counts, too.
    """
    tensor = cfg.parallel.tensor
    num_shards = num_ranks // tensor // cfg.parallel.replicate
    dims = cut_dims(model) if tensor > 1 else {}
    in_float32 = model.float32_names if cfg.compute_dtype != "float32" else frozenset()
    of_muon = matrices(model) if cfg.optimizer.kind == "muon" else {}
    weights = optimizer = gradients = 0
    for name, parameter in model.named_parameters():
        dim = dims.get(name)
        local = list(parameter.shape)
        if dim is not None:
            local[dim] = -(-local[dim] // tensor)
        if local:
            local[0] = -(-local[0] // num_shards)
        size, itemsize = math.prod(local), parameter.element_size()
        if cfg.optimizer.master == "none" and parameter.requires_grad and name not in in_float32:
            itemsize = 2
        stored = size * itemsize
        weights += size + 4 * local[0] if int8_rows(parameter) is not None else stored
        if parameter.requires_grad:
            gradients += 0 if cfg.optimizer.in_backward else stored
            optimizer += 4 * size if name in of_muon else _state_bytes(parameter, torch.Size(local), dim, cfg)
    return Lasting(weights, optimizer, gradients)


def _state_bytes(parameter: Tensor, local: torch.Size, dim: int | None, cfg: RunConfig) -> int:
    """Bytes of what the optimizer keeps of a parameter, of which a rank has the shape `local`. dim: the one
    that tensor parallelism cuts.
    """
    kind = cfg.optimizer.kind
    if kind == "sgd":
        return 4 * local.numel() if cfg.optimizer.momentum else 0
    kind = "adamw" if kind == "muon" else kind  # of what is no matrix
    whole = dim != 1 or parameter.shape[1] % (BLOCK * cfg.parallel.tensor) == 0
    part = torch.empty(local, device="meta")
    moments = sum(each.num_bytes(part) for each in storages_of(kind, parameter.shape, whole))
    count = 4  # bytes of a number of updates
    return moments + count + (4 * local.numel() + count if cfg.optimizer.ema_decay else 0)
