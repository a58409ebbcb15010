"""Predicts the largest disk usage of a run: checkpoints, the checkpoint that is being written, the export."""

from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.checkpoint.export import plan_files
from lptune.config import RunConfig
from lptune.models import read_index

_ITEM_BYTES = {"original": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def disk_report(cfg: RunConfig, num_parameters: int, checkpoint: int, model: Path | None) -> str:
    """One line on the largest disk usage of a run.

    checkpoint: bytes of a checkpoint (`DryRun.checkpoint_bytes`). model: the base checkpoint, whose tensors
    give the size of the export; None if it is not on this machine.
    """
    kept, more = _num_kept(cfg)
    # Old checkpoints are removed after the new one was published.
    num_steps = cfg.given_num_steps
    at_once = kept + 1 if num_steps is None else min(kept + 1, num_steps)
    if only_at_a_stop := not (cfg.checkpoint.at_end or cfg.checkpoint.every_steps):
        at_once = 1  # such a run is not saved by minutes either: see CheckpointWriter.is_overdue
    total = at_once * checkpoint
    parts = [f"{at_once} checkpoint{'s' * (at_once > 1)} of {size_text(checkpoint)}"]
    if only_at_a_stop:
        parts[0] += " (saved if a signal stops the run)"
    elif at_once > 1:
        parts[0] += f" (checkpoint.keep_last={cfg.checkpoint.keep_last}{more}, one being written)"
    if cfg.export.enabled:
        export, dtype = _export_bytes(cfg, num_parameters, model)
        total += export
        parts.append(f"an export of {size_text(export)}{dtype}")
    ends = ""
    if cfg.checkpoint.keep_every and num_steps is None and not only_at_a_stop:
        ends = f", and {size_text(checkpoint)} for every {cfg.checkpoint.keep_every} steps"
    return f"disk of output_dir: at most {size_text(total)}: {' and '.join(parts)}{ends}"


def _num_kept(cfg: RunConfig) -> tuple[int, str]:
    keep = cfg.checkpoint
    kept, more = keep.keep_last + keep.keep_best, f", keep_best={keep.keep_best}" if keep.keep_best else ""
    if keep.keep_every and cfg.given_num_steps is not None:
        kept, more = kept + cfg.given_num_steps // keep.keep_every, f"{more}, keep_every={keep.keep_every}"
    return kept, more


def _export_bytes(cfg: RunConfig, num_parameters: int, model: Path | None) -> tuple[int, str]:
    """Returns (bytes of the export, a note on the dtype if it had to be assumed)."""
    if model is not None:
        try:
            files = plan_files(read_index(model), cfg.export)
        except UserError:  # for example a folder with config.json alone
            pass
        else:
            return sum(target.num_bytes for each in files.values() for target in each.values()), ""
    dtype = "bfloat16" if cfg.export.dtype == "original" else cfg.export.dtype
    return _ITEM_BYTES[cfg.export.dtype] * num_parameters, f" in {dtype}"
