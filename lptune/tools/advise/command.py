"""Which precision.kind is fastest on this device.

On this machine the model's own linear layers are timed (measure.py). For a GPU that is not here the answer is
a prediction, and says so.
"""

from typing import TYPE_CHECKING

import click

from lptune.base import progress
from lptune.base.errors import UserError
from lptune.cli import planned_model, preflight, recipe
from lptune.config import (
    PRECISION_KINDS,
    RunConfig,
    check_sources,
)
from lptune.hardware.devices import gpu_here, named_device

if TYPE_CHECKING:
    from lptune.training import PlannedStep


@click.command()
@planned_model.options
@click.option(
    "--device",
    "device_name",
    metavar="GPU",
    help="A GPU that need not be here: h100, a100, 4090, …  [default: this machine's GPU, or its CPU]",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind for kind in PRECISION_KINDS if kind != "none"]),
    metavar="KIND",
    help="Compare none with this kind only; may be repeated.  [default: all that run natively]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Time nothing new after so many seconds; --quality takes as long again.  "
    "[default: 60 on a CPU, 180 on a GPU]",
)
@click.option(
    "--quality",
    "measures_quality",
    is_flag=True,
    help="Read the model and the data, and measure the loss in each kind before any training.",
)
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [key=value …]")
def advise(
    config_name: str | None,
    world_size: int,
    device_name: str | None,
    preset: str | None,
    kinds: tuple[str, ...],
    seconds: float | None,
    measures_quality: bool,
    arguments: tuple[str, ...],
) -> None:
    """Which precision.kind is fastest for CONFIG here, and does low precision pay at all?

    Times the linear layers of the model in every kind that this device runs natively, and the rest of a
    training step once; predicts a step of each kind. Reads no weights and no data without --quality. For a
    GPU that is not here (--device) it predicts from counted bytes and FLOPs.
    """
    kinds = tuple(dict.fromkeys(kinds))
    named = named_device(device_name) if device_name is not None else None
    cfg, recipe_path, path, overrides = planned_model.load("advise", config_name, arguments, device_name)
    assert config_name is not None  # `load` refuses that
    if not isinstance(cfg, RunConfig):
        raise UserError(f"advise: {recipe_path.stem} does not train: there is no step to advise on")
    cfg.check_ranks(world_size)
    num_data_ranks = cfg.parallel.data_ranks(world_size)
    if measures_quality:
        if preset is not None:
            raise UserError("--quality: measures the model in model.path; leave --preset out")
        cfg = recipe.load(recipe_path, path, overrides)  # data.source may be missing
        check_sources("data.source", cfg.data.sources)
        preflight.check_models(cfg)

    model_config, model_name, _ = planned_model.of_config(cfg, path, preset)
    with progress.in_place("loading torch ..."):
        step = recipe.planned_step(recipe_path, cfg)
        from lptune.tools.advise import answer
        from lptune.tools.advise.report import Setting
    if step is None:
        raise UserError(f"advise: {recipe_path.stem} does not train: there is no step to advise on")
    here = gpu_here() if cfg.device != "cpu" else None
    setting = Setting(
        config=config_name,
        model=model_name,
        device=named.name if named else here.name if here else _cpu_name(),
        tokens=cfg.micro_batch_size * cfg.data.seq_len,
        num_micro_batches=cfg.global_batch_size // cfg.micro_batch_size // num_data_ranks,
        num_ranks=world_size,
    )
    if named is not None and (here is None or named.name != here.name):
        lines = answer.predicted_for(cfg, model_config, setting, named, kinds, seconds, measures_quality)
    else:
        lines = answer.timed(cfg, step, model_config, setting, kinds, seconds, measures_quality)
    for line in [*lines, *_notes(cfg, step)]:
        click.echo(line)


def _cpu_name() -> str:
    import torch

    threads = torch.get_num_threads()
    return f"this CPU, {threads} thread{'' if threads == 1 else 's'}"


def _notes(cfg: RunConfig, step: "PlannedStep") -> list[str]:
    """What was not as the run would be."""
    left_out = {
        "parallel.tensor": cfg.parallel.tensor > 1,
        "parallel.context": cfg.parallel.context > 1,
        "parallel.expert": cfg.parallel.expert > 1,
        "parallel.cpu_offload": cfg.parallel.cpu_offload,
        "freeze": bool(cfg.freeze),
        f"the model in {step.frozen}": step.frozen is not None,
        "the head in 8 bits": not cfg.precision.is_none and "lm_head" not in cfg.precision.skip,
    }
    names = [name for name, is_so in left_out.items() if is_so]
    lines = [f"not in these figures: {', '.join(names)}"] if names else []
    if cfg.optimizer.in_backward:
        lines.append("optimizer.in_backward: updates are timed as if after backward")
    return lines
