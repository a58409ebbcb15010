"""Resuming: which checkpoint a run goes on from, and whether it may."""

from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from lptune.checkpoint.files import read_json, sha256
from lptune.checkpoint.hf import weights_digest
from lptune.checkpoint.manifest import Manifest, list_checkpoints, read_manifest, step_folder_name, verify
from lptune.config import FinetuneConfig, UserError
from lptune.distributed import World

Facts = Mapping[str, Any]
_MEANING = {
    "weights": " (a digest of the safetensors in model.path)",
    "data": " (a digest of the training rows: the source or a key of data.* has changed)",
    "config.json": " (a digest of that file in model.path)",
    "tokenizer.json": " (a digest of that file in model.path)",
}
"""What the values in a fingerprint that say nothing by themselves are."""


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
    """What state.json says, and `run_facts` wrote."""
    path = manifest.folder / "state.json"
    facts = read_json(path)
    if not isinstance(facts, dict) or facts.get("step") != manifest.step:
        raise UserError(
            f"{path}: is not of step {manifest.step}, as the manifest is; lptune did not write it"
        )
    if not isinstance(facts.get("fingerprint"), dict):
        raise UserError(f"{path}: has no fingerprint; lptune did not write it")
    try:
        date.fromisoformat(facts.get("started_on", ""))
    except (TypeError, ValueError):
        raise UserError(
            f"{path}: started_on: expected a date, found {facts.get('started_on')!r:.60}"
        ) from None
    return facts
