"""Whether a run would write over its own input, its config or its recipe."""

import dataclasses
import glob
from collections.abc import Iterable, Iterator
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
RUN_FOLDERS = ("checkpoints", "export", "logs", "tensorboard", "wandb")
"""Names that a run writes in OUTPUT_DIR."""

_PATHS = ("model.path", "teacher.path", "logits.folder", "data.source", "data.eval_source")


def check_inputs_stay(cfg: Any) -> None:
    """Raises UserError if the run would write over its own input (model or data) in `output_dir`.

    cfg: a config with `output_dir`, and paths among the texts of `model`, `data` and, if it has them,
    `teacher` and `logits`. Reads no file.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    sections = [name for name in ("model", "teacher", "logits", "data") if hasattr(cfg, name)]
    for section in sections:
        for key, value in _texts(section, dataclasses.asdict(getattr(cfg, section))):
            for path in _paths(key, value):
                if _is_written(path, output_dir):
                    if key == "data.cache":
                        raise UserError(
                            f"data.cache: {path} is in output_dir ({cfg.output_dir}), where the run writes; "
                            "choose another"
                        )
                    is_model = key in ("model.path", "teacher.path")
                    what = f"the model in {key}" if is_model else f"{path}, which {key} names"
                    raise UserError(f"output_dir: {cfg.output_dir} would overwrite {what}; choose another")


def check_given_files_stay(cfg: Any, files: Iterable[Path]) -> None:
    """Raises UserError if the run would remove one of `files` (its config or its recipe) in `output_dir`.

    The config.yaml of a run may be one of them: a run that does not continue there renames it.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    for path in files:
        below = None
        with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
            below = _below(path, output_dir)
        if below and (below[0] in RUN_FOLDERS or below[0].startswith(TEMPORARY)):
            raise UserError(f"output_dir: {cfg.output_dir} would overwrite {path}; move that file away")


def _is_written(path: Path, output_dir: Path) -> bool:
    """Whether a run with this `output_dir` writes, renames or removes `path`, a folder above it, or files in
    it. Neither of the two needs to exist.
    """
    names = (*RUN_FILES, *RUN_FOLDERS)
    with suppress(OSError, RuntimeError):  # RuntimeError: a circle of links
        below = _below(path, output_dir)
        if below is not None and (not below or below[0] in names or below[0].startswith(TEMPORARY)):
            return True
    return False


def _below(path: Path, folder: Path) -> tuple[str, ...] | None:
    """The names on the way from `folder` to `path`; None if `path` is not below `folder`."""
    path, folder = path.resolve(), folder.resolve()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    missing = folder.relative_to(there).parts
    for part in (path, *path.parents):
        if part.exists() and part.samefile(there):
            names = path.relative_to(part).parts
            return names[len(missing) :] if names[: len(missing)] == missing else None
    return None


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(key if name == key.rpartition(".")[2] else f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(key, item)


def _paths(key: str, text: str) -> list[Path]:
    """The files that a text names, as a path or a glob; empty if it is not a path."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown home
        if key == "data.cache":  # the run makes it if it does not exist
            return [] if text in ("auto", "none") else [Path(text).expanduser()]
        if not text:
            return []
        path = Path(text).expanduser()
        if path.exists():
            return [path]
        if key in _PATHS or not set("\n{") & set(text):
            return [Path(found) for found in glob.glob(str(path), recursive=True)]
    return []
