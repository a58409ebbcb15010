"""What `plan` and `advise` share: their options, the config without data, and the model of a config that need
not be there, from config.json or from a preset.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lptune.base import progress
from lptune.base.errors import UserError, closest
from lptune.base.files import MEBI, read_text
from lptune.cli import catalog, recipe
from lptune.config import RunConfig
from lptune.launch import flags

if TYPE_CHECKING:
    from lptune.models import Facts


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that tell the run: --config, those of `ranks` (1 if none is given), --preset."""
    command = click.option(
        "--preset", metavar="FAMILY/SIZE", help="Use this model instead of the one in model.path."
    )(command)
    command = ranks(command, default=1)
    return click.option(
        "--config", "config_name", metavar="CONFIG", help="Name or path of a config.  [required]"
    )(command)


def ranks(command: Callable[..., Any], default: int | None = None) -> Callable[..., Any]:
    """The options that tell the number of ranks, `world_size`; `default` if none is given. They are
    --world-size, and those of `lptune run`, so that its command line can be tried as it stands. Options that
    only a launch reads are taken and left alone.
    """
    usual = "" if default is None else f"  [{default}]"

    @click.option("--nproc-per-node", "--nproc_per_node", metavar="N", help="As for `lptune run`.")
    @click.option("--nnodes", metavar="N", help="As for `lptune run`.")
    @click.option(
        "--world-size", type=click.IntRange(min=1), metavar="N", help=f"Ranks on all machines.{usual}"
    )
    @functools.wraps(command)
    def of_ranks(
        *args: Any, world_size: int | None, nnodes: str | None, nproc_per_node: str | None, **kwargs: Any
    ) -> Any:
        if nnodes or nproc_per_node:
            if world_size:
                raise UserError("--world-size: is --nnodes times --nproc-per-node; leave it out, or those")
            world_size = _count("--nnodes", nnodes) * _count("--nproc-per-node", nproc_per_node)
        return command(*args, world_size=world_size or default, **kwargs)

    for name in _OF_A_LAUNCH:
        of_ranks = click.option(name, hidden=True, expose_value=False)(of_ranks)
    return click.option("-v", "--verbose", is_flag=True, hidden=True, expose_value=False)(of_ranks)


_OF_A_LAUNCH = (
    "--restarts",
    "--hang-timeout",
    "--rdzv-endpoint",
    "--rdzv-conf",
    "--rdzv-id",
    "--node-rank",
    "--local-addr",
    "--master-addr",
    "--master-port",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
)


def _count(name: str, value: str | None) -> int:
    """The number that the flag has, 1 without it. UserError for what `lptune run` takes, but only a launch
    makes a number of: a range of machines, the GPUs of a machine.
    """
    command = click.get_current_context().info_name
    flags.check_count(f"{command}", name, value)
    if value is not None and not value.isdecimal():
        raise UserError(f"{command}: {name}: {value} is known where a run starts; give a number here")
    return int(value or 1)


Loaded = tuple[Any, Path, Path, Sequence[str]]
"""The config, the files of its recipe and of the config, and the overrides."""


def load(command: str, config_name: str | None, arguments: Sequence[str], device_name: str | None) -> Loaded:
    """What the command line names. The config needs no data, since none are read. command: for messages.
    device_name: a GPU, for which `device: cpu` of the file gives way. Raises UserError.
    """
    from lptune.config import key_paths  # slow to import

    if config_name is None:
        given = next((word for word in arguments if catalog.is_config(word)), "CONFIG")
        raise UserError(f"{command}: --config is required: lptune {command} --config {given}")
    recipe_path, path, overrides = recipe.split(config_name, arguments)
    no_data = ["data.source=builtin"] if "data.source" in key_paths(recipe.config_class(recipe_path)) else []
    cfg = recipe.load(recipe_path, path, [*no_data, *overrides])
    if device_name is not None and isinstance(cfg, RunConfig) and cfg.device == "cpu":
        overrides = ["device=auto", *overrides]
        cfg = recipe.load(recipe_path, path, [*no_data, *overrides])
        if cfg.device == "cpu":
            raise UserError(
                f"--device: {device_name} is a GPU, and device=cpu stands for a CPU; leave one of them out"
            )
    return cfg, recipe_path, path, overrides


def from_preset(name: str, key: str, backend: str = "auto") -> "Facts":
    """The preset `name`, as FAMILY/SIZE, for `model.backend`. Raises UserError, which begins with `key`, if
    there is none.
    """
    from lptune import models

    names = models.preset_names()
    if name not in names:
        raise UserError(f"{key}: no such family and size: {name}{closest(name, names)}")
    return models.facts_of_preset(name, backend)


_NOTED = re.compile(r"^# the model: the preset (\S+)$", re.MULTILINE)


def note(model_name: str) -> str:
    """A line for the comment of a config, by which `of_config` finds the preset that it was planned for."""
    return f"the model: {model_name}"


def of_config(cfg: RunConfig, path: Path, preset: str | None) -> "tuple[Facts, str, Path | None]":
    """The model of `cfg`, where it was read from, and its folder if it exists. path: of the config."""
    from lptune import models

    folder = Path(cfg.model.path).expanduser()
    if preset is None and folder.is_dir():
        if any(folder.glob("*.safetensors")):  # otherwise the folder has no weights
            index = models.read_index(folder)
            # What it refuses, it refuses before torch is imported.
            models.read_config(folder, cfg.model.backend)
            with progress.in_place("loading torch ..."):
                from lptune import checkpoint
            config = checkpoint.read_config(index, click.echo, cfg.model.backend)
        else:
            config = models.read_config(folder, cfg.model.backend)
        return config, f"{folder / 'config.json'}", folder
    # Configs of other recipes than full_finetune have a suffix: llama3_2/1b_distill.
    family, _, size = "/".join(path.with_suffix("").parts[-2:]).partition("/")
    noted = _NOTED.search(read_text(path, 4 * MEBI))
    name = preset or (noted[1] if noted else f"{family}/{size.partition('_')[0]}")
    if preset is None and name not in models.preset_names():
        raise UserError(
            f"model.path: {folder} is not there, and there is no preset {name}; name the model with "
            "--preset FAMILY/SIZE, as `lptune new-checkpoint` takes it"
        )
    return from_preset(name, "--preset", cfg.model.backend), f"the preset {name}", None
