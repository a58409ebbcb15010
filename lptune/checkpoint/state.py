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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

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
from lptune.distributed import World, local_rows, reshard
from lptune.linear import Int8Weight, dequantized, int8_rows, row_scales, weights_changed

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
    for kind, tensors in (
        ("model", _model_tensors(model) | _scales(model)),
        ("optimizer", _optimizer_tensors(model, optimizer)),
        ("replicated", dict(replicated) if world.is_main else {}),
    ):
        if kind == "replicated" and not tensors:
            continue
        name = f"{kind}-{world.rank:05d}.safetensors"
        local = {key: local_rows(tensor) for key, tensor in tensors.items()}
        # A rank that holds no row of a tensor stores nothing for it.
        stored = {key: _plain(rows) for key, (rows, _) in local.items() if rows.numel()}
        save_tensors(partial / name, stored)
        files[name] = describe_file(partial / name)
        shards |= {
            key: [asdict(Shard(name, start, rows.shape[0] if rows.dim() else 1))]
            for key, (rows, start) in local.items()
            if rows.numel()
        }
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
    """Fills parameters and optimizer state from a verified checkpoint, each rank reading its own rows.

    replicated: what save_state was given, filled in place as far as the checkpoint has it; a run that used
    another precision has other tensors there, or none.
    """
    for name, parameter in model.named_parameters():
        # A parameter that was never updated (a frozen one) has no state.
        if f"{_MOMENTS[0]}/{name}" in manifest.shards:
            step = torch.tensor(float(manifest.step), dtype=torch.float32, device=parameter.device)
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}
    for name, tensor in (_model_tensors(model) | _optimizer_tensors(model, optimizer)).items():
        if int8_rows(tensor) is not None and f"{_SCALE}/{name}" in manifest.shards:
            _read_int8(manifest, name, tensor)
        else:
            _read(manifest, name, tensor)
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


def _plain(rows: Tensor) -> Tensor:
    # What is stored in INT8 is four times as large when dequantized: too large for the device, perhaps.
    return rows.contiguous() if int8_rows(rows) is None else dequantized(rows).cpu()


def _scales(model: nn.Module) -> dict[str, Tensor]:
    """Beside weights that are stored in INT8. Not needed to load them, but to load them bit for bit."""
    return {
        f"{_SCALE}/{name}": row_scales(parameter)
        for name, parameter in model.named_parameters()
        if int8_rows(parameter) is not None
    }


@torch.no_grad()
def _read_int8(manifest: Manifest, name: str, tensor: Tensor) -> None:
    values, scales = dequantized(tensor), row_scales(tensor).clone()
    _read(manifest, name, values)
    _read(manifest, f"{_SCALE}/{name}", scales)
    weight, _ = local_rows(tensor)
    assert isinstance(weight, Int8Weight)
    weight.fill_from(local_rows(values)[0], local_rows(scales)[0])


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
def _read(manifest: Manifest, name: str, tensor: Tensor) -> None:
    local, start = local_rows(tensor)
    stop, num_read = start + (local.shape[0] if local.dim() else 1), 0
    for shard in manifest.shards.get(name, []):
        first, last = max(start, shard.start), min(stop, shard.start + shard.rows)
        if first >= last:
            continue
        with safe_open(str(manifest.folder / shard.file), framework="pt", device="cpu") as tensors:
            rows = (
                tensors.get_slice(name)[first - shard.start : last - shard.start]
                if local.dim()
                else tensors.get_tensor(name)
            )
        target = local[first - start : last - start] if local.dim() else local
        if rows.shape != target.shape:
            raise UserError(
                f"{manifest.folder}: tensor {name!r} has rows of shape {list(rows.shape[1:])}, the model has "
                f"{list(target.shape[1:])}"
            )
        target.copy_(rows)
        num_read += rows.numel()
    if num_read != local.numel():
        raise UserError(
            f"{manifest.folder}: holds {num_read} elements of {name!r} where {local.numel()} are needed"
        )
