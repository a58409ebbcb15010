"""`lptune validate`: checks a config, without torch, on any machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lptune.base.errors import UserError
from lptune.cli import catalog, planned_model, preflight, recipe
from lptune.config import RunConfig, check_inputs_stay, check_sources, data_files, entries
from lptune.launch import flags


@click.command()
@click.argument("arguments", nargs=-1, metavar="CONFIG [key=value …]")
@click.option(
    "--config",
    "config_name",
    metavar="CONFIG",
    help="CONFIG, as for `lptune run`; RECIPE may then stand first.",
)
@planned_model.launch
@click.pass_context
def validate(
    context: click.Context,
    arguments: tuple[str, ...],
    config_name: str | None,
    world_size: int | None,
    nnodes: str | None,
    nproc_per_node: str | None,
) -> None:
    """Check CONFIG (a name or a path) and its overrides against what the recipe accepts.

    A command of `lptune run` can be checked as it stands: lptune validate RECIPE --config CONFIG key=value …
    Without RECIPE, the config is checked for that of its first comment, or full_finetune.
    Without a number of ranks, a note says so where it does not fit one rank.

    A model that is there already is checked, too: its family, its settings and the headers of its weights.
    """
    names = [argument for argument in arguments[:1] if "=" not in argument]
    overrides = arguments[len(names) :]
    if config_name is None:
        if not names:
            raise UserError("validate: no config given; `lptune ls` shows what there is")
        config_name = names.pop()
    path = catalog.find_config(config_name)
    recipe_name = names[0] if names else catalog.recipe_of(path)
    recipe_path = catalog.find_recipe(recipe_name)
    cfg = recipe.load(recipe_path, path, overrides)
    sizes = [world_size] if world_size else _world_sizes(nnodes, nproc_per_node)
    if isinstance(cfg, RunConfig):
        for size in sizes:
            cfg.check_ranks(size)
        check_inputs_stay(cfg)
        for key, of in (("data.source", cfg.data.sources), ("data.eval_source", cfg.data.eval_sources)):
            check_sources(key, [each for each in of if _is_here(each.source)])
    if recipe_path in catalog.recipes().values():  # a copied recipe may read its model from anywhere
        preflight.check_models(cfg, may_be_absent=True)
    from lptune.config import key_paths  # slow to import

    cls = type(cfg)
    click.echo(f"ok: {path} fits {recipe_name} ({cls.__name__})")
    if isinstance(cfg, RunConfig) and not sizes:
        if nproc_per_node:
            click.echo(f"note: --nproc-per-node: {nproc_per_node} is known where the run starts")
        else:
            try:
                cfg.check_ranks(1)
            except UserError as error:
                click.echo(f"note: not on one rank: {error}")
    told = [context.get_parameter_source(name) for name in ("rdzv_endpoint", "master_addr")]
    if nnodes not in (None, "1", "1:1") and ParameterSource.COMMANDLINE not in told:
        click.echo("note: --nnodes: `lptune run` needs --rdzv-endpoint HOST:PORT as well")
    for key in key_paths(cls):
        for name in _missing(key, _value(cfg, key)):
            click.echo(f"note: {key}: {name} does not exist here yet")


def _world_sizes(nnodes: str | None, nproc_per_node: str | None) -> Sequence[int]:
    """All numbers of ranks that the run may have; none where it is not told, or only its start will tell."""
    ranks = nproc_per_node or "1"
    if not (nnodes or nproc_per_node) or not ranks.isdecimal():
        return []
    return [machines * int(ranks) for machines in flags.numbers_of_machines("validate", nnodes or "1")]


def _missing(key: str, value: Any) -> list[str]:
    """Files and folders that the value of `key` names, that a run will read, and that do not exist here."""
    leaf = key.rpartition(".")[2]
    if leaf.endswith("source") and isinstance(value, str | tuple):  # a hub id and `builtin` are no files
        return [entry.source for entry in entries(value) if not _is_here(entry.source)]
    is_path = leaf == "path" or (leaf == "resume" and value not in ("auto", "none"))
    return [value] if is_path and isinstance(value, str) and not Path(value).expanduser().exists() else []


def _is_here(source: str) -> bool:
    try:
        data_files(source)
    except UserError:
        return Path(source).expanduser().exists()
    return True


def _value(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg
