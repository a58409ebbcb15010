"""The disk that a run takes at most: its checkpoints, the one that is being written, and the export."""

from pathlib import Path

from lptune.checkpoint.export import plan_files
from lptune.checkpoint.hf import read_index
from lptune.config import RunConfig, UserError, size_text

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and both moments in float32."""
_ITEM_BYTES = {"original": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def disk_report(cfg: RunConfig, num_parameters: int, model: Path | None) -> str:
    """One line. model: the imported folder, by whose tensors the export goes; None: it is not there."""
    checkpoint = BYTES_PER_PARAMETER * num_parameters
    kept, more = _num_kept(cfg)
    # Removed are those that need not stay after the new one has been published.
    at_once = kept + 1 if cfg.num_steps is None else min(kept + 1, cfg.num_steps)
    if only_at_a_stop := not (cfg.checkpoint.at_end or cfg.checkpoint.every_steps):
        at_once = 1  # CheckpointWriter.is_overdue: such a run is not saved by minutes either
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
    if cfg.checkpoint.keep_every and cfg.num_steps is None and not only_at_a_stop:
        ends = f", and {size_text(checkpoint)} for every {cfg.checkpoint.keep_every} steps"
    return f"disk of output_dir: at most {size_text(total)}: {' and '.join(parts)}{ends}"


def _num_kept(cfg: RunConfig) -> tuple[int, str]:
    keep = cfg.checkpoint
    kept, more = keep.keep_last + keep.keep_best, f", keep_best={keep.keep_best}" if keep.keep_best else ""
    if keep.keep_every and cfg.num_steps is not None:
        kept, more = kept + cfg.num_steps // keep.keep_every, f"{more}, keep_every={keep.keep_every}"
    return kept, more


def _export_bytes(cfg: RunConfig, num_parameters: int, model: Path | None) -> tuple[int, str]:
    """And what was taken for granted."""
    if model is not None:
        try:
            files = plan_files(read_index(model), cfg.export)
        except UserError:  # config.json alone, say
            pass
        else:
            return sum(target.num_bytes for each in files.values() for target in each.values()), ""
    dtype = "bfloat16" if cfg.export.dtype == "original" else cfg.export.dtype
    return _ITEM_BYTES[cfg.export.dtype] * num_parameters, f" in {dtype}"
