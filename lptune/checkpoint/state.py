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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.checkpoint.files import (
    fresh_folder,
    publish_folder,
    read_json,
    save_tensors,
    set_aside,
    sha256,
    write_json,
)
from lptune.checkpoint.hf import weights_digest
from lptune.checkpoint.manifest import (
    Manifest,
    Shard,
    describe_file,
    list_checkpoints,
    read_manifest,
    step_folder_name,
    step_of,
    verify,
    write_manifest,
)
from lptune.config import FinetuneConfig, UserError
from lptune.distributed import Piece, World, fused_rows, is_first_holder, local_pieces, reshard
from lptune.linear import dequantized, int8_rows, plain_rows, row_scales, weights_changed

Facts = Mapping[str, Any]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "int8_scale"
_MEANING = {
    "weights": " (a digest of the safetensors in model.path)",
    "data": " (a digest of the training rows: the source or a key of data.* has changed)",
    "config.json": " (a digest of that file in model.path)",
    "tokenizer.json": " (a digest of that file in model.path)",
}
"""What the values in a fingerprint that say nothing by themselves are."""


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
        ("model", _model_tensors(model) | _scales(model)),
        ("optimizer", _optimizer_tensors(model, optimizer)),
        ("replicated", dict(replicated) if world.is_main else {}),
    ):
        # What several ranks hold is stored by the first of them, what a rank holds nothing of by others.
        mine = {key: tensor for key, tensor in tensors.items() if is_first_holder(tensor)}
        pieces = {key: local_pieces(tensor, _fused(fused, key)) for key, tensor in mine.items()}
        stored = {key: _plain(mine[key]) for key, parts in pieces.items() if parts}
        if not stored:
            continue
        name = f"{kind}-{world.rank:05d}.safetensors"
        save_tensors(partial / name, stored)
        files[name] = describe_file(partial / name)
        shards |= {key: [asdict(_shard(name, piece)) for piece in pieces[key]] for key in stored}
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


def load_state(
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicated: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fills parameters and optimizer state from a verified checkpoint, each rank reading its own part.

    replicated: what save_state was given, filled in place as far as the checkpoint has it; a run that used
    another precision has other tensors there, or none.
    """
    for name, parameter in model.named_parameters():
        # A parameter that was never updated (a frozen one) has no state.
        if f"{_MOMENTS[0]}/{name}" in manifest.shards:
            step = torch.tensor(float(manifest.step), dtype=torch.float32, device=parameter.device)
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}
    fused = fused_rows(model)
    for name, tensor in (_model_tensors(model) | _optimizer_tensors(model, optimizer)).items():
        rows = _fused(fused, name)
        if int8_rows(tensor) is not None:
            _read_int8(manifest, name, tensor, rows)
        else:
            _read(manifest, name, tensor, rows)
    weights_changed(model)
    for name, tensor in replicated.items():
        if name in manifest.shards:
            _read(manifest, name, tensor)


def find_checkpoint(folder: Path, resume: str, world: World, warn: Callable[[str], None]) -> Manifest | None:
    """The checkpoint to continue from: the one at `resume`, or with `auto` the newest in `folder` that
    verifies.

    All ranks call it; the main rank verifies, so that all continue from the same one. warn: called with a
    line for each damaged checkpoint that is passed over. Damaged ones are never deleted. Raises UserError
    when there are checkpoints and all are damaged.
    """
    found = _find_verified(folder, resume, warn) if world.is_main else None
    step = int(world.sum(found.step if found else -1 if world.is_main else 0))
    if world.is_main or step < 0:
        return found
    return read_manifest(folder / step_folder_name(step) if resume == "auto" else Path(resume).expanduser())


def _find_verified(folder: Path, resume: str, warn: Callable[[str], None]) -> Manifest | None:
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume).expanduser()
        if (path / "checkpoints").is_dir():
            raise UserError(f"resume: {path} is a run's folder; give one of its checkpoints/step-…")
        try:
            return verify(path)
        except UserError as error:
            raise UserError(f"resume: {error}; give another checkpoint, auto or none") from None
    candidates = list_checkpoints(folder)
    for candidate in candidates:
        try:
            return verify(candidate)
        except UserError as error:
            warn(f"warning: checkpoint passed over: {error}")
    if candidates:
        raise UserError(
            f"{folder}: none of its {len(candidates)} checkpoints is intact; start anew in another output_dir"
        )
    return None


def run_facts(cfg: FinetuneConfig, data_digest: str, started_on: date) -> Facts:
    """What state.json says of a run beside its step.

    fingerprint: what must not change between the parts of one run. Precision, compilation, ranks and length
    may.
    started_on: the day that chat templates which write a date see, in every part of the run.
    """
    folder = Path(cfg.model.path).expanduser()
    fingerprint = {
        # What decides the data comes before the data, so that the cause is named and not its consequence.
        "seed": cfg.seed,
        "data.seq_len": cfg.data.seq_len,
        "global_batch_size": cfg.global_batch_size,
        "config.json": sha256(folder / "config.json")[:16],
        "weights": weights_digest(folder)[:16],
        "tokenizer.json": sha256(folder / "tokenizer.json")[:16],
        "data": data_digest[:16],
    }
    return {"fingerprint": fingerprint, "started_on": started_on.isoformat()}


def started_on(manifest: Manifest | None) -> date:
    """The day the run began: today, if there is nothing to resume."""
    return date.fromisoformat(_facts(manifest)["started_on"]) if manifest else date.today()


def check_fingerprint(manifest: Manifest, facts: Facts) -> None:
    """Refuses to resume a run whose data, model or seed differ, naming both values."""
    saved = _facts(manifest)["fingerprint"]
    for key, value in facts["fingerprint"].items():
        if saved.get(key) != value:
            raise UserError(
                f"{manifest.folder}: was saved with {key} {saved.get(key)!r}, this run has {value!r}"
                f"{_MEANING.get(key, '')}; restore it, or start anew in another output_dir"
            )


def _facts(manifest: Manifest) -> Facts:
    facts: Facts = read_json(manifest.folder / "state.json")
    return facts


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def _plain(tensor: Tensor) -> Tensor:
    """This rank's part of it, as it is written."""
    weight = int8_rows(tensor)
    if weight is None:
        return _on_this_rank(plain_rows(tensor).detach()).contiguous()
    # What is stored in INT8 is four times as large when dequantized: too large for the device, perhaps.
    return dequantized(weight.detach()).cpu()


def _shard(file: str, piece: Piece) -> Shard:
    rows, columns = (*piece.values.shape, 1, 1)[:2]
    return Shard(file, piece.row, rows, piece.column, columns, piece.at)


def _fused(fused: Mapping[str, Sequence[int]], key: str) -> Sequence[int]:
    """`fused_rows` of the parameter that `key` belongs to: its own name, or `exp_avg/NAME`."""
    return fused.get(key.rpartition("/")[2], ())


def _scales(model: nn.Module) -> dict[str, Tensor]:
    """Beside weights that are stored in INT8. Not needed to load them, but to load them bit for bit."""
    return {
        f"{_SCALE}/{name}": row_scales(parameter)
        for name, parameter in model.named_parameters()
        if int8_rows(parameter) is not None
    }


def _has_scales(manifest: Manifest, name: str, tensor: Tensor) -> bool:
    """Whether the checkpoint has the scales of this very layout: a row that tensor parallelism cuts has one
    in each part.
    """
    stored = manifest.shards.get(f"{_SCALE}/{name}", [])
    return max((each.column + each.columns for each in stored), default=0) == row_scales(tensor).shape[1]


@torch.no_grad()
def _read_int8(manifest: Manifest, name: str, tensor: Tensor, fused: Sequence[int]) -> None:
    # All of a row first: its scale comes from its largest value.
    values, scales = dequantized(tensor), None
    _read(manifest, name, values, fused)
    if _has_scales(manifest, name, tensor):
        scales = row_scales(tensor).clone()
        _read(manifest, f"{_SCALE}/{name}", scales, fused)
    weight = int8_rows(tensor)
    assert weight is not None
    weight.fill_from(_on_this_rank(values), None if scales is None else _on_this_rank(scales))


def _on_this_rank(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


@torch.no_grad()
def _read(manifest: Manifest, name: str, tensor: Tensor, fused: Sequence[int] = ()) -> None:
    shards = manifest.shards.get(name, [])
    size = (*tensor.shape, 1, 1)[:2]
    stored = tuple(
        max((first + number for first, number in ends), default=0)
        for ends in (
            [(shard.start, shard.rows) for shard in shards],
            [(shard.column, shard.columns) for shard in shards],
        )
    )
    if stored != size:
        raise UserError(
            f"{manifest.folder}: holds {stored[0]} x {stored[1]} elements of {name!r} where "
            f"{size[0]} x {size[1]} are needed"
        )
    num_needed = num_read = 0
    for piece in local_pieces(tensor, fused):
        num_needed += piece.values.numel()
        num_read += sum(_read_overlap(manifest, name, shard, piece) for shard in shards)
    if num_read != num_needed:
        raise UserError(
            f"{manifest.folder}: holds {num_read} elements of {name!r} where {num_needed} are needed"
        )


def _read_overlap(manifest: Manifest, name: str, shard: Shard, piece: Piece) -> int:
    """Copies what `piece` has in common with `shard`; returns how many elements."""
    mine = _shard("", piece)
    row, end_row = max(mine.start, shard.start), min(mine.start + mine.rows, shard.start + shard.rows)
    column = max(mine.column, shard.column)
    end_column = min(mine.column + mine.columns, shard.column + shard.columns)
    if row >= end_row or column >= end_column:
        return 0
    target, dim = piece.values, piece.values.dim()
    with safe_open(str(manifest.folder / shard.file), framework="pt", device="cpu") as tensors:
        if dim == 0:
            part = tensors.get_tensor(name)
        else:
            first = row - shard.start + shard.at
            region = (
                slice(first, first + end_row - row),
                slice(column - shard.column, end_column - shard.column),
            )
            part = tensors.get_slice(name)[region[:dim]]
            into = (
                slice(row - mine.start, end_row - mine.start),
                slice(column - mine.column, end_column - mine.column),
            )
            target = target[into[:dim]]
    target.copy_(part)
    return int(part.numel())
