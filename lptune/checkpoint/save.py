"""Training state: float32 master weights and optimizer moments by parameter name, and a few numbers.

The position in the data is the step (the order of rows is a function of seed and epoch), and no other random
state exists, so weights, moments, step and fingerprint are all that an exact continuation needs. Tensors are
plain and in high
precision: a run may resume under another precision, compile mode or number of ranks.

    step-00000100/  model-00000.safetensors  optimizer-00000.safetensors  …one pair per rank
                    replicated-00000.safetensors, where a precision keeps state: amax histories
                    state.json  manifest.json
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lptune.checkpoint.files import (
    fresh_folder,
    publish_folder,
    read_json,
    save_tensors,
    set_aside,
    write_json,
)
from lptune.checkpoint.manifest import (
    Shard,
    describe_file,
    list_checkpoints,
    step_folder_name,
    step_of,
    write_manifest,
)
from lptune.checkpoint.stored import (
    as_shard,
    fused_rows_of,
    int8_scales,
    model_tensors,
    on_this_rank,
    optimizer_tensors,
)
from lptune.distributed import World, fused_rows, is_first_holder, local_pieces, reshard
from lptune.linear import dequantized, int8_rows, plain_rows

Facts = Mapping[str, Any]


def save_state(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Facts,
    world: World,
    keep_last: int,
    replicated: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Publishes `folder/step-N` (all ranks call it) and removes checkpoints beyond the newest `keep_last`.

    replicated: further tensors, the same on every rank; the main rank writes them.
    """
    reshard(model)
    final = folder / step_folder_name(step)
    partial = folder / f".tmp-{final.name}"
    if world.is_main:
        if final.exists():  # published folders are never written into
            set_aside(final)
        fresh_folder(partial)
    world.barrier()
    files: dict[str, dict[str, Any]] = {}
    shards: dict[str, list[dict[str, Any]]] = {}
    fused = fused_rows(model)
    for kind, tensors in (
        ("model", model_tensors(model) | int8_scales(model)),
        ("optimizer", optimizer_tensors(model, optimizer)),
        ("replicated", dict(replicated) if world.is_main else {}),
    ):
        # What several ranks hold is stored by the first of them, what a rank holds nothing of by others.
        mine = {key: tensor for key, tensor in tensors.items() if is_first_holder(tensor)}
        pieces = {key: local_pieces(tensor, fused_rows_of(fused, key)) for key, tensor in mine.items()}
        stored = {key: _plain(mine[key]) for key, parts in pieces.items() if parts}
        if not stored:
            continue
        name = f"{kind}-{world.rank:05d}.safetensors"
        save_tensors(partial / name, stored)
        files[name] = describe_file(partial / name)
        shards |= {key: [asdict(as_shard(name, piece)) for piece in pieces[key]] for key in stored}
    write_json(partial / f"rank-{world.rank:05d}.json", {"files": files, "shards": shards})
    world.barrier()
    if world.is_main:
        write_json(partial / "state.json", {"step": step, **facts})
        files, merged = _merge_ranks(partial, world.size)
        files["state.json"] = describe_file(partial / "state.json")
        write_manifest(partial, step, world.size, files, merged)
        publish_folder(partial, final)
        # What a folder holds of later steps is neither counted nor deleted.
        for old in [path for path in list_checkpoints(folder) if step_of(path) <= step][keep_last:]:
            shutil.rmtree(old)
    world.barrier()
    return final


def _plain(tensor: Tensor) -> Tensor:
    """This rank's part of it, as it is written."""
    weight = int8_rows(tensor)
    if weight is None:
        return on_this_rank(plain_rows(tensor).detach()).contiguous()
    # What is stored in INT8 is four times as large when dequantized: too large for the device, perhaps.
    return dequantized(weight.detach()).cpu()


def _merge_ranks(folder: Path, world_size: int) -> tuple[dict[str, dict[str, Any]], dict[str, list[Shard]]]:
    """What each rank said of its files and shards."""
    files: dict[str, dict[str, Any]] = {}
    shards: dict[str, list[Shard]] = {}
    for rank in range(world_size):
        path = folder / f"rank-{rank:05d}.json"
        said = read_json(path)
        files |= said["files"]
        for name, parts in said["shards"].items():
            shards.setdefault(name, []).extend(Shard(**part) for part in parts)
        path.unlink()
    return files, shards
