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
    """The options that tell the run: --config, those of `launch` (one rank if none is given), --preset."""
    command = click.option(
        "--preset", metavar="FAMILY/SIZE", help="Use this model instead of the one in model.path."
    )(command)
    command = ranks(command)
    return click.option(
        "--config", "config_name", metavar="CONFIG", help="Name or path of a config.  [required]"
    )(command)


def ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `launch`, of which the command gets one `world_size`, 1 if none is given."""

    @launch
    @functools.wraps(command)
    def of_ranks(
        *args: Any, world_size: int | None, nnodes: str | None, nproc_per_node: str | None, **kwargs: Any
    ) -> Any:
        for name, value in (("--nnodes", nnodes), ("--nproc-per-node", nproc_per_node)):
            if value is not None and not value.isdecimal():
                command_name = click.get_current_context().info_name
                raise UserError(
                    f"{command_name}: {name}: {value} is known where a run starts; give a number here"
                )
        world_size = world_size or int(nnodes or 1) * int(nproc_per_node or 1)
        return command(*args, world_size=world_size, **kwargs)

    return of_ranks


def launch(command: Callable[..., Any]) -> Callable[..., Any]:
    """--world-size, and the options by which `lptune run` starts ranks, so that its command line can be tried
    as it stands. Those that only a launch reads are taken and left alone.
    """

    @click.option("--nproc-per-node", "--nproc_per_node", metavar="N", help="As for `lptune run`.")
    @click.option("--nnodes", metavar="N", help="As for `lptune run`.")
    @click.option(
        "--world-size", type=click.IntRange(min=1), metavar="N", help="Ranks on all machines, in their place."
    )
    @functools.wraps(command)
    def of_launch(
        *args: Any, world_size: int | None, nnodes: str | None, nproc_per_node: str | None, **kwargs: Any
    ) -> Any:
        name = f"{click.get_current_context().info_name}"
        flags.check_count(name, "--nnodes", nnodes)
        flags.check_count(name, "--nproc-per-node", nproc_per_node)
        if world_size and (nnodes or nproc_per_node):
            raise UserError("--world-size: is --nnodes times --nproc-per-node; leave it out, or those")
        counts = {"world_size": world_size, "nnodes": nnodes, "nproc_per_node": nproc_per_node}
        return command(*args, **counts, **kwargs)

    for name in _OF_A_LAUNCH:
        names = {f"--{name}", f"--{name.replace('-', '_')}"}  # torchrun takes both
        of_launch = click.option(*sorted(names), hidden=True, expose_value=False)(of_launch)
    of_launch = click.option(
        "--rdzv-backend", "--rdzv_backend", hidden=True, expose_value=False, callback=_check_backend
    )(of_launch)
    return click.option("-v", "--verbose", is_flag=True, hidden=True, expose_value=False)(of_launch)


_OF_A_LAUNCH = (
    "restarts", "hang-timeout", "rdzv-endpoint", "rdzv-conf", "rdzv-id", "node-rank", "local-addr",
    "master-addr", "master-port", "log-dir", "redirects", "tee", "local-ranks-filter",
)  # fmt: skip


def _check_backend(context: click.Context, _: click.Parameter, value: str | None) -> None:
    flags.check_backend(f"{context.info_name}", value or "static")


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
