"""`lptune plan`: what would a run take of each rank? Answered without weights, data or a GPU.

The model comes from config.json in `model.path` where that folder is there, from a preset otherwise; the
config's own name is the preset's, as configs are named after the models that they are for.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lptune.cli import catalog, recipe
from lptune.config import FinetuneConfig, UserError, check_batches, closest, key_paths, load_config

if TYPE_CHECKING:
    from lptune.models import DecoderConfig


@click.command()
@click.option("--config", "config_name", required=True, metavar="CONFIG", help="Name or path of a config.")
@click.option(
    "--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on all machines."
)
@click.option("--preset", metavar="FAMILY/SIZE", help="The model, instead of the one in model.path.")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [key=value …]")
def plan(config_name: str, world_size: int, preset: str | None, arguments: tuple[str, ...]) -> None:
    """Plan one training step of CONFIG on so many ranks: precision, memory, collectives.

    Takes RECIPE, --config and keys as `lptune run` does, and --world-size in place of torchrun's flags.
    `device=cpu` plans for CPUs, anything else for GPUs.
    """
    named = bool(arguments) and "=" not in arguments[0]
    recipe_path = catalog.find_recipe(arguments[0] if named else "full_finetune")
    path = catalog.find_config(config_name)
    cls = recipe.config_class(recipe_path)
    no_data = ["data.source=builtin"] if "data.source" in key_paths(cls) else []  # none is read
    cfg = load_config(cls, path, [*no_data, *arguments[named:]])
    if not isinstance(cfg, FinetuneConfig):
        raise UserError(
            f"plan: {recipe_path.stem} does not take a FinetuneConfig, which is what can be planned"
        )

    if world_size % (cfg.parallel.replicate * cfg.parallel.tensor) == 0:  # else the dry run says so
        check_batches(cfg.global_batch_size, cfg.micro_batch_size, world_size // cfg.parallel.tensor)
    model_config, source = _model(cfg, path, preset)
    from lptune.training.dry_run import dry_run

    report = dry_run(cfg, model_config, world_size).report()
    click.echo(f"plan of {config_name} for {source}\n{report}")


def _model(cfg: FinetuneConfig, path: Path, preset: str | None) -> "tuple[DecoderConfig, str]":
    """The model, and where it was read."""
    from lptune import models

    names = [f"{family}/{size}" for family, sizes in models.PRESETS.items() for size in sizes]
    folder = Path(cfg.model.path).expanduser()
    if preset is None and folder.is_dir():
        return models.read_config(folder), f"{folder / 'config.json'}"
    name = preset or "/".join(path.with_suffix("").parts[-2:])
    if name not in names:
        if preset is None:
            raise UserError(
                f"model.path: {folder} is not there, and there is no preset {name}; name the model with "
                "--preset FAMILY/SIZE, as `lptune new-checkpoint` takes it"
            )
        raise UserError(f"--preset: no such family and size: {name}{closest(name, names)}")
    family, _, size = name.partition("/")
    return models.config_from_dict(models.PRESETS[family][size], f"preset {name}"), f"the preset {name}"
