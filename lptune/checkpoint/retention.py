"""Retention: removes old checkpoints. The newest checkpoint always stays.

A checkpoint is renamed before it is removed, so that a kill during the removal leaves no incomplete `step-…`.
Files in it that lptune did not write are kept, in a folder `old-step-…`.
"""

import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.base.files import LongLineError, lines_of, object_of, read_json
from lptune.base.progress import print_line
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.checkpoint.files import remove_folder, remove_leftover, set_aside
from lptune.checkpoint.manifest import check_sizes
from lptune.config import CheckpointConfig

_OURS = re.compile(r"[a-z]+-[0-9]{5}[0-9-]*\.safetensors|rank-[0-9]{5}\.json|(state|manifest)\.json")


def steps_to_keep(eval_losses: Mapping[int, float | None], cfg: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay. eval_losses: eval_loss, or None, of each step with a checkpoint."""
    steps = sorted(eval_losses, reverse=True)
    keep = set(steps[: cfg.keep_last])
    if cfg.keep_every:
        keep |= {step for step in steps if step % cfg.keep_every == 0}
    known = [(loss, -step) for step, loss in eval_losses.items() if loss is not None]
    return keep | {-step for _, step in sorted(known)[: cfg.keep_best]}


def remove_old(folder: Path, newest: int, cfg: CheckpointConfig, metrics: Path | None = None) -> None:
    """Removes old checkpoints by the keys of `cfg`. newest: the step that was just published.

    metrics: metrics.jsonl of the run. If a stop left an evaluation to the next launch, only it has the loss.
    Checkpoints of later steps are neither counted nor removed. Raises UserError if `newest` is incomplete.
    """
    checkpoints = {step_of(path): path for path in list_checkpoints(folder) if step_of(path) <= newest}
    if newest not in checkpoints:
        name = step_folder_name(newest)
        raise UserError(f"{folder / name}: is gone, it was removed or renamed while the run was writing")
    check_sizes(checkpoints[newest])
    losses = _eval_losses(checkpoints, metrics) if cfg.keep_best else dict.fromkeys(checkpoints)
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


def _eval_losses(checkpoints: Mapping[int, Path], metrics: Path | None) -> dict[int, float | None]:
    """Step -> eval_loss, from state.json or else from `metrics`; None: there is none."""
    losses, without = dict[int, float | None](), list[int]()
    for step, checkpoint in checkpoints.items():
        losses[step] = None
        with suppress(UserError):  # a damaged checkpoint cannot be the best one, whatever the metrics say
            losses[step] = _number(read_json(checkpoint / "state.json"))
            if losses[step] is None:
                without.append(step)
    later = evaluations(metrics) if without and metrics is not None else {}
    return losses | {step: later.get(step) for step in without}


def best_checkpoint(folder: Path, metrics: Path) -> Path:
    """The checkpoint in `folder` with the lowest eval_loss; the newest of equal ones, or if none has any."""
    checkpoints = {step_of(path): path for path in list_checkpoints(folder)}
    losses = _eval_losses(checkpoints, metrics)
    return checkpoints[min(checkpoints, key=lambda step: (losses[step] is None, losses[step] or 0.0, -step))]


def patience(eval_losses: Mapping[int, float | None]) -> tuple[int, int]:
    """The first step with the lowest of `eval_losses`, by step, and the number of evaluations after it. None
    is a loss that was not finite; step 0 if no loss was finite.
    """
    best, best_step, num_since = math.inf, 0, 0
    for step, loss in sorted(eval_losses.items()):
        num_since += 1
        if loss is not None and loss < best:
            best, best_step, num_since = loss, step, 0
    return best_step, num_since


def evaluations(metrics: Path) -> dict[int, float | None]:
    """Step -> held-out loss, of the lines of metrics.jsonl that have one; None: it was not finite.

    Lines that no run writes are passed over. Raises UserError for one without an end, OSError as open does.
    """
    found = dict[int, float | None]()
    try:
        for line in lines_of(metrics):
            record = object_of(line) if b'"eval_loss"' in line else None
            if record is not None and type(record.get("step")) is int:
                found[record["step"]] = _number(record)
    except LongLineError as error:
        raise UserError(f"{metrics}: a line of it {error}; move the file away") from None
    return found


def _number(record: Any) -> float | None:
    """`eval_loss` of an object read from JSON, where it is a number."""
    loss = record.get("eval_loss") if isinstance(record, dict) else None
    # A NaN has no order, and an integer may be beyond any float.
    if isinstance(loss, (int, float)) and not isinstance(loss, bool) and abs(loss) <= sys.float_info.max:
        return float(loss)
    return None
