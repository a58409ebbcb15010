"""Retention: removes old checkpoints. The newest checkpoint always stays.

A checkpoint is renamed before it is removed, so that a kill during the removal leaves no incomplete `step-…`.
Files in it that lptune did not write are kept, in a folder `old-step-…`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from lptune.checkpoint.files import read_json, remove_folder, remove_leftover, set_aside
from lptune.checkpoint.manifest import check_sizes, list_checkpoints, step_of
from lptune.config import CheckpointConfig, UserError
from lptune.distributed import print_line

_OURS = re.compile(r"[a-z]+-[0-9]{5}[0-9-]*\.safetensors|rank-[0-9]{5}\.json|(state|manifest)\.json")


def steps_to_keep(eval_losses: Mapping[int, float | None], cfg: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay. eval_losses: eval_loss, or None, of each step with a checkpoint."""
    steps = sorted(eval_losses, reverse=True)
    keep = set(steps[: cfg.keep_last])
    if cfg.keep_every:
        keep |= {step for step in steps if step % cfg.keep_every == 0}
    known = [(loss, -step) for step, loss in eval_losses.items() if loss is not None]
    return keep | {-step for _, step in sorted(known)[: cfg.keep_best]}


def remove_old(folder: Path, newest: int, cfg: CheckpointConfig) -> None:
    """Removes old checkpoints by the keys of `cfg`. newest: the step that was just published.

    Checkpoints of later steps are neither counted nor removed. Raises UserError if `newest` is incomplete.
    """
    checkpoints = {step_of(path): path for path in list_checkpoints(folder) if step_of(path) <= newest}
    check_sizes(checkpoints[newest])
    losses = {step: _eval_loss(path) if cfg.keep_best else None for step, path in checkpoints.items()}
    for step in checkpoints.keys() - steps_to_keep(losses, cfg):
        _remove(checkpoints[step])


def _remove(checkpoint: Path) -> None:
    foreign = sorted(path.name for path in checkpoint.iterdir() if not _OURS.fullmatch(path.name))
    if not foreign or checkpoint.is_symlink():
        remove_folder(checkpoint)
        return
    aside = set_aside(checkpoint)
    for path in aside.iterdir():
        if path.name not in foreign:
            remove_leftover(path)
    print_line(f"set aside: {checkpoint} -> {aside.name}: {', '.join(foreign)[:200]} is not of a checkpoint")


def _eval_loss(checkpoint: Path) -> float | None:
    try:
        state = read_json(checkpoint / "state.json")
    except UserError:  # a damaged checkpoint cannot be the best one
        return None
    loss = state.get("eval_loss") if isinstance(state, dict) else None
    return float(loss) if isinstance(loss, (int, float)) else None
