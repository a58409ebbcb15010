"""`lptune plan`: a dry run. What would a run take on each rank? It needs no weights, data or GPU.

The model comes from config.json in `model.path` if that folder exists, otherwise from the preset with the
name of the config: configs are named after their models.
"""

import math
import shlex
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lptune.base import progress
from lptune.base.errors import UserError
from lptune.base.files import write_errors, write_text
from lptune.base.text import size_text, wrapped
from lptune.cli import catalog, planned_model, recipe
from lptune.cli.places import PathArgument, check_new_config
from lptune.config import RunConfig
from lptune.hardware.devices import gpu_here, named_device

if TYPE_CHECKING:
    from lptune.models import Facts
    from lptune.plan.fit import Tried
    from lptune.training import PlannedStep


@click.command()
@planned_model.options
@click.option(
    "--device",
    "device_name",
    metavar="GPU",
    help="The GPU of each rank: h100, h200, a100, 4090, …, or its name as torch reports it.  [default: the "
    "GPU of this machine, or an h100]",
)
@click.option(
    "--teacher-preset", metavar="FAMILY/SIZE", help="Use this model instead of the one in teacher.path."
)
@click.option(
    "--host-memory",
    type=click.FloatRange(min=0),
    metavar="GB",
    help="What of the host's memory a rank may take. Without it, changes may take any.",
)
@click.option(
    "--write", type=PathArgument(), metavar="FILE", help="Write the config, with what was chosen, to FILE."
)
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [key=value …]")
def plan(
    config_name: str | None,
    world_size: int,
    device_name: str | None,
    preset: str | None,
    teacher_preset: str | None,
    host_memory: float | None,
    write: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Dry run of one training step of CONFIG: precision, memory, collectives and disk on each rank.

    Takes what `lptune run` takes: RECIPE, --config, keys, and how many ranks on how many machines. Prints
    whether the run fits the GPU; if it does not, prints which changes would make it fit. --write writes the
    config with the first of them that fits on as many ranks. `device=cpu` plans for CPUs, any other device,
    and --device, for GPUs.
    """
    if device_name is not None:
        named_device(device_name)
    if host_memory is not None and not math.isfinite(host_memory):
        raise UserError(f"--host-memory: found {host_memory}; give a number of GB")
    if write is not None:
        check_new_config(write, "--write: ")
        if not write.parent.is_dir():
            raise UserError(f"--write: {write.parent}: no such folder; make it")
    cfg, recipe_path, path, _ = loaded = planned_model.load("plan", config_name, arguments, device_name)
    if not isinstance(cfg, RunConfig):
        raise UserError(f"plan: {recipe_path.stem} does not train: there is no step to plan")
    if write is not None and cfg.device == "cpu":
        raise UserError("--write: looks for what fits a GPU, and device=cpu plans for CPUs; leave it out")
    cfg.check_ranks(world_size)
    model_config, model_name, folder = planned_model.of_config(cfg, path, preset)
    with progress.in_place("loading torch ..."):
        step = recipe.planned_step(recipe_path, cfg)
        from lptune.checkpoint.disk import disk_report
        from lptune.plan.dry_run import dry_run
        from lptune.plan.fit import fits, heading, remedies, verdict

    if step is None:
        raise UserError(f"plan: {recipe_path.stem} does not train: there is no step to plan")
    frozen = _frozen(step, cfg, teacher_preset)
    device = None
    if cfg.device != "cpu":
        device = named_device(device_name) if device_name else gpu_here() or named_device("h100")
    with progress.in_place(f"planning a step of {len(model_config.layers)} blocks ..."):
        found = dry_run(cfg, model_config, world_size, device, step=step, frozen_config=frozen)
    _echo(f"plan of {config_name} for {model_name}")
    click.echo(f"{found.report()}\n")
    _echo(disk_report(cfg, found.num_parameters, found.checkpoint_bytes, folder))
    if device is None:
        return
    _echo(verdict(found, device))
    on = f"{world_size} x {device.name}"
    host_bytes = math.inf if host_memory is None else host_memory * 1e9
    if found.host_bytes > host_bytes:
        _echo(f"a rank takes {size_text(found.host_bytes)} of host memory, and may take {host_memory:g} GB")

    def save(changes: dict[str, Any], why: str) -> None:
        if write is not None:
            why = f"{config_name} for {on}, {why} (`lptune plan`)."
            line = _write_config(write, loaded, model_name, changes, why, world_size)
            _echo(f"{write} is written; its run: {line}")

    if fits(found.peak_bytes, device) and found.host_bytes <= host_bytes:
        save({}, f"as it is: {verdict(found, device)}")
        return
    chosen: Tried | None = None
    with progress.in_place("planning changes ..."):
        for line in heading(found, device):
            progress.print_line(line)
        same = write is not None  # what it writes is for the ranks that there are
        asked = cfg, model_config, world_size, device, found, step, frozen
        for each in remedies(*asked, same_ranks=same, host_bytes=host_bytes):
            for part in wrapped(each.line, hang=2):
                progress.print_line(part)
            if same and each.fits:
                chosen = chosen or each
                # One with the rows of the config may take host memory, which then must be known.
                if host_memory is None or not each.changes_rows:
                    chosen = each
                    break
    if chosen is not None:
        save(chosen.keys, f"changed to fit:{chosen.line}")
        if chosen.changes_rows and host_memory is None:
            _echo("`--host-memory GB` looks for a change that keeps the rows of a step")
    elif same:
        larger = "--device" if host_memory is None else "--device or --host-memory"
        raise UserError(f"--write: nothing that was planned fits {on}; name more ranks or a larger {larger}")


def _write_config(
    file: Path,
    loaded: planned_model.Loaded,
    model_name: str,
    changes: Mapping[str, Any],
    why: str,
    num_ranks: int,
) -> str:
    """Writes the config of `loaded`, with `changes` (dotted key -> value), to `file`, under `why` and the
    model's name (planned_model.of_config) as a comment. Returns the line that runs it. Raises UserError as
    `load_config` does; data.source alone may be missing, and is then in that line.
    """
    cfg, recipe_path, config, overrides = loaded
    cls = type(cfg)
    from lptune.config.load import changed_yaml, key_paths, read_values  # slow to import

    is_own = recipe_path != catalog.recipes().get(recipe_path.stem)
    words = ["lptune", "run", *(["--nproc-per-node", str(num_ranks)] if num_ranks > 1 else [])]
    words += [str(recipe_path) if is_own else recipe_path.stem, "--config", str(file)]
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


def _echo(text: str) -> None:
    click.echo("\n".join(wrapped(text, hang=2)))


def _frozen(step: "PlannedStep", cfg: RunConfig, preset: str | None) -> "Facts | None":
    """The second model of `step`, from config.json in the folder that its key names or from `preset`; None if
    none runs.
    """
    from lptune import models

    if step.frozen is None:
        if preset is not None:
            raise UserError("--teacher-preset: no teacher runs in a step of this run; leave it out")
        return None
    if preset is not None:
        return planned_model.from_preset(preset, "--teacher-preset")
    folder = Path(attrgetter(step.frozen)(cfg)).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"{step.frozen}: {folder} is not there; name the model with --teacher-preset FAMILY/SIZE, as "
            "`lptune new-checkpoint` takes it"
        )
    return models.read_config(folder)
