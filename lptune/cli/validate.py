"""`lptune validate`: is this config right? Answered without torch, on any machine."""

from pathlib import Path
from typing import Any

import click

from lptune.cli import catalog, recipe
from lptune.config import key_paths, load_config

_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".parquet")


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value …]")
@click.option(
    "--recipe", "recipe_name", default="full_finetune", show_default=True, help="Recipe the config is for."
)
def validate(config: str, overrides: tuple[str, ...], recipe_name: str) -> None:
    """Check CONFIG (a name or a path) and its overrides against what the recipe accepts."""
    path = catalog.find_config(config)
    cls = recipe.config_class(catalog.find_recipe(recipe_name))
    cfg = load_config(cls, path, overrides)
    click.echo(f"ok: {path} fits {recipe_name} ({cls.__name__})")
    for key in key_paths(cls):
        value = _value(cfg, key)
        if isinstance(value, str) and _is_path(key, value) and not Path(value).expanduser().exists():
            click.echo(f"note: {key}: {value} does not exist here yet")


def _is_path(key: str, value: str) -> bool:
    """Does the value of `key` name a file or folder that a run will read? A hub id and `builtin` do not."""
    leaf = key.rpartition(".")[2]
    if leaf.endswith("source"):
        return value.endswith(_DATA_SUFFIXES) or value.startswith(("/", "./", "../", "~"))
    return leaf == "path" or (leaf == "resume" and value not in ("auto", "none"))


def _value(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg
