"""`lptune run`: one rank in this process, several ranks through torchrun, with the same command line.

The config is checked first, without torch: a misspelt key is reported within a fraction of a second, before a
cluster starts. A process is a rank if RANK is in its environment; plain `torchrun -m lptune.cli.main run …`
works, too.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from lptune.base import progress
from lptune.base.errors import UserError
from lptune.cli import banner, catalog, closing, preflight, recipe, recipe_help
from lptune.config import RunConfig
from lptune.launch import flags, launcher, rank

_OWN_FLAGS = (
    "--config",
    "--verbose",
    "-v",
    "--nproc-per-node",
    "--nnodes",
    "--restarts",
    "--hang-timeout",
    "--help",
    "-h",
)


@click.command(
    cls=recipe_help.RunCommand,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [torchrun flags]",
)
@click.option("--config", "config_name", metavar="CONFIG", help="Name or path of a config.  [required]")
@click.option(
    "--nproc-per-node", "--nproc_per_node", metavar="N", help="Ranks on this machine; `gpu`: one per GPU."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the precision of every layer, too.")
@click.option("--nnodes", metavar="N", help="Machines; needs --rdzv-endpoint HOST:PORT (docs/multi_node.md).")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start the run again after a failure, at most N times in a row without a new checkpoint.",
)
@click.option(
    "--hang-timeout",
    type=click.IntRange(min=0),
    default=600,
    metavar="S",
    help="End a run of several ranks, and say who hangs, when none goes on for S seconds; 0: never.  [600]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE [key=value …]")
def run(
    config_name: str | None,
    nproc_per_node: str | None,
    nnodes: str | None,
    verbose: bool,
    restarts: int,
    hang_timeout: int,
    arguments: tuple[str, ...],
) -> None:
    """Run RECIPE (a name or a path) with CONFIG and key=value overrides.

    One rank runs in this process. More ranks or machines, or any other flag of torchrun before RECIPE, start
    torchrun. Rank 0 prints here, the other ranks to OUTPUT_DIR/logs/rank-N.log. The first failure ends all
    ranks on all machines.
    """
    torchrun_flags, positional = flags.split_command("run", arguments, _OWN_FLAGS)
    if verbose:
        os.environ[progress.VERBOSE] = "1"
    if not positional:
        raise UserError("run: no recipe given; `lptune ls` shows what there is")
    if wrong := _misplaced_config(positional, config_name):
        raise UserError(wrong)
    assert config_name is not None
    counts = {"--nnodes": nnodes, "--nproc-per-node": nproc_per_node}
    for name, value in counts.items():
        flags.check_count("run", name, value)
    recipe_path, overrides = catalog.find_recipe(positional[0]), positional[1:]
    config_path = catalog.find_config(config_name)
    names = recipe_path, positional[0], config_name
    if rank.is_rank():
        if torchrun_flags or restarts or any(counts.values()):
            raise UserError(
                "run: this process is a rank already (RANK is set); leave torchrun's flags and --restarts to "
                "its launcher"
            )
        rank.as_rank(lambda: _run_here(recipe.load(recipe_path, config_path, overrides), *names))
        return
    written = [positional[0], "--config", config_name, *overrides]
    os.environ[progress.COMMAND] = shlex.join(written)
    cfg = recipe.load(recipe_path, config_path, overrides)
    if recipe_path in catalog.recipes().values():
        if isinstance(cfg, RunConfig):
            num_machines, num_local_ranks = flags.known_ranks(nnodes, nproc_per_node)
            # Other machines may have another number of ranks; the ranks check what all of them make.
            preflight.check(cfg, 1 if num_machines == 1 else None, num_local_ranks)
        else:
            preflight.check_models(cfg)
    given = [f"{name}={value}" for name, value in counts.items() if value is not None]
    if restarts:
        _supervise(cfg, restarts, [*torchrun_flags, *given, f"--hang-timeout={hang_timeout}", *written])
    is_asked = any(value not in (None, "1", "1:1") for value in counts.values())
    if torchrun_flags or is_asked or flags.launches_by_environment():
        # Several machines print one banner, that of rank 0. Flags of torchrun are checked further on.
        if not torchrun_flags and flags.known_ranks(nnodes, nproc_per_node)[0] == 1:
            banner.show_in_launcher(cfg, *names[1:])
        launcher.torchrun(
            [*torchrun_flags, *given],
            ["run", str(recipe_path), "--config", str(config_path), *overrides],
            cfg,
            recipe_path,
            hang_timeout,
        )
    flags.stay_on_loopback()
    _run_here(cfg, *names)


def _supervise(cfg: Any, restarts: int, arguments: list[str]) -> NoReturn:
    """Runs `lptune run ARGUMENTS`, again after failures, and exits with its code."""
    from lptune.launch.restarts import supervise

    if getattr(cfg, "resume", "auto") != "auto":
        raise UserError(f"run: --restarts goes on from the newest checkpoint; resume={cfg.resume} would not")
    launcher.let_ranks_find_lptune()
    output_dir = cfg.output_dir if isinstance(cfg, RunConfig) else None
    sys.exit(supervise(["run", *arguments], restarts, output_dir))


def _run_here(cfg: Any, path: Path, recipe_name: str, config_name: str) -> None:
    """Runs the recipe at `path` in this process, between the lines that need no torch."""
    banner.show(cfg, recipe_name, config_name)
    banner.note_other_recipe(cfg, path)
    os.environ[progress.RECIPE] = str(path)
    with banner.phase(cfg, "loading torch"):
        main = recipe.load_main(path)
    with closing.around(cfg):
        main(cfg)


def _misplaced_config(positional: list[str], config_name: str | None) -> str:
    """A message with the right command if a config stands in the place of RECIPE or --config is missing."""
    name, *others = positional
    if name not in catalog.recipes() and catalog.is_config(name):
        config = config_name or name
        recipe_name = catalog.recipe_of(catalog.configs().get(config, Path(config)))
        return f"run: {name} is a config, and RECIPE comes first: lptune run {recipe_name} --config {config}"
    if config_name is not None:
        return ""
    given = next((word for word in (*others, name) if catalog.is_config(word)), None)
    if given is not None:
        return f"run: {given} is a config: lptune run {name} --config {given}"
    return f"run: --config is required: lptune run {name} --config CONFIG; `lptune ls` shows what there is"
