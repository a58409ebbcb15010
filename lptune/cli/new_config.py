"""A config that a command has chosen: `plan --write` and `advise --write`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lptune.base.errors import UserError
from lptune.base.files import write_errors, write_text
from lptune.base.text import wrapped
from lptune.cli import catalog, planned_model
from lptune.cli.places import PathArgument, check_new_config

option = click.option(
    "--write", type=PathArgument(), metavar="FILE", help="Write the config, with what was chosen, to FILE."
)


def check(file: Path | None) -> None:
    """Raises UserError unless `file` can be written, or is None."""
    if file is None:
        return
    check_new_config(file, "--write: ")
    if not file.parent.is_dir():
        raise UserError(f"--write: {file.parent}: no such folder; make it")


def write(
    file: Path,
    loaded: planned_model.Loaded,
    model_name: str,
    changes: Mapping[str, Any],
    why: str,
    num_ranks: int = 1,
) -> str:
    """Writes the config of `loaded`, with `changes` (dotted key -> value), to `file`, under `why` and the
    model's name (planned_model.of_config) as a comment. Returns the line that runs it. Raises UserError as
    `check` and `load_config` do; data.source alone may be missing, and is then in that line.
    """
    cfg, recipe_path, config, overrides = loaded
    cls = type(cfg)
    from lptune.config.load import changed_yaml, key_paths, read_values  # slow to import

    is_own = recipe_path != catalog.recipes().get(recipe_path.stem)
    recipe = str(recipe_path) if is_own else recipe_path.stem
    words = ["lptune", "run", *(["--nproc-per-node", str(num_ranks)] if num_ranks > 1 else [])]
    words += [recipe, "--config", str(file)]
    assumed = ["data.source=builtin"] if "data.source" in key_paths(cls) else []
    if assumed and "source" not in read_values(cls, config, overrides).get("data", {}):
        words.append("data.source=rows.jsonl")
    line = shlex.join(words)
    text = changed_yaml(cls, config, overrides, changes, assumed)
    heading = [*wrapped(why, 100), planned_model.note(model_name), "", f"  {line}"]
    check_new_config(file, "--write: ")  # once more: the answer may have taken minutes
    with write_errors(f"--write: {file}:", "choose another name"):
        write_text(file, "".join(f"# {each}".rstrip() + "\n" for each in heading) + f"\n{text}", shared=True)
    return line
