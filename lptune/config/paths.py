"""Whether a run would write over its own input."""

import glob
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY

RUN_FILES = (
    ".lock",
    "config.yaml",
    "metrics.jsonl",
    "precision_plan.json",
    "shadow.jsonl",
    "export.json",
    "reference.safetensors",
    "run.json",
    "samples.jsonl",
    "report.html",
)
RUN_FOLDERS = ("checkpoints", "parts", "export", "logs", "tensorboard", "wandb")
"""Names that a run writes in OUTPUT_DIR."""


def check_inputs_stay(cfg: Any) -> None:
    """Raises UserError if the run would write over its own input (model or data) in `output_dir`. Reads no
    file. cfg: a RunConfig.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    for key, text in _inputs(cfg):
        for path in _paths(key, text):
            if _is_written(path, output_dir):
                what = f"the model in {key}" if key in cfg.model_paths else f"{path}, which {key} names"
                raise UserError(f"output_dir: {cfg.output_dir} would overwrite {what}; choose another")
    # The run makes it if it does not exist. What an address of other storage makes of a path is nowhere.
    cache = Path(cfg.data.cache.removeprefix("file://")).expanduser()
    if cfg.data.cache not in ("auto", "none") and _is_written(cache, output_dir):
        raise UserError(
            f"data.cache: {cache} is in output_dir ({cfg.output_dir}), where the run writes; choose another"
        )


def _is_written(path: Path, output_dir: Path) -> bool:
    """Whether a run with this `output_dir` writes, renames or removes `path`, a folder above it, or files in
    it. Neither of the two needs to exist.
    """
    names = (*RUN_FILES, *RUN_FOLDERS)
    with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
        path, folder = path.resolve(), output_dir.resolve()
        if path.is_relative_to(folder):
            first = path.relative_to(folder).parts[:1]
            return not first or first[0] in names or first[0].startswith(TEMPORARY)
    return False


def _inputs(cfg: Any) -> Iterator[tuple[str, str]]:
    """Key and text of what the run reads."""
    yield from cfg.model_paths.items()
    if hasattr(cfg, "logits") and cfg.logits.folder is not None:
        yield "logits.folder", cfg.logits.folder
    if cfg.data.chat_template:
        yield "data.chat_template", cfg.data.chat_template
    yield from (("data.source", each.source) for each in cfg.data.sources)
    yield from (("data.eval_source", each.source) for each in cfg.data.eval_sources)


def _paths(key: str, text: str) -> list[Path]:
    """The files that a text names, as a path or, of a source, a glob; empty if it is not a path."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown home
        path = Path(text).expanduser()
        if path.exists():
            return [path]
        if key.endswith("source"):
            return [Path(found) for found in glob.glob(str(path), recursive=True)]
    return []
