"""Does a run fit its GPU, and if not, which change makes it fit? Each answer comes from a dry run.

A GPU is taken to hold a plan whose peak leaves a tenth of its memory free: for CUDA's context, NCCL's
buffers, kernels' workspaces and fragmentation, none of which a plan counts.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from lptune import models
from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.config import RunConfig
from lptune.hardware.devices import Device
from lptune.plan import memory
from lptune.plan.dry_run import DryRun, dry_run
from lptune.training.planned import PlannedStep

HEADROOM = 0.1
"""Share of the GPU's memory that must stay free."""
_ENOUGH = 2
"""After this many remedies that fit, no other is tried."""
_MOST_TIMES = 16
"""Largest number of ranks that is tried, as a multiple of the given number."""
_RANKS = "--world-size"

Remedy = dict[str, bool | int | str]
"""Changes that save memory: keys of a config (and _RANKS) with values."""


def fits(peak_bytes: int, device: Device) -> bool:
    """Whether the peak leaves the share HEADROOM of the device's memory free."""
    return peak_bytes <= (1 - HEADROOM) * device.memory_bytes


def verdict(found: DryRun, device: Device) -> str:
    """One line: whether the run fits, with the peak."""
    name, peak = f"{device.name} ({device.memory_bytes / 1e9:,.0f} GB)", size_text(found.peak_bytes)
    free = 1 - found.peak_bytes / device.memory_bytes
    if fits(found.peak_bytes, device):
        return f"fits {name}: the peak is {peak}, {free:.0%} stay free"
    if free >= 0:
        return f"may not fit {name}: the peak is {peak}, and {HEADROOM:.0%} should stay free"
    return f"does not fit {name}: the peak is {peak}"


def remedies(
    cfg: RunConfig,
    model_config: models.Facts,
    world_size: int,
    device: Device,
    found: DryRun,
    step: PlannedStep = PlannedStep(),  # noqa: B008  (frozen)
    frozen_config: models.Facts | None = None,
) -> Iterator[str]:
    """Tries changes by dry runs; yields a line for each when it is done: its peak, and whether it fits.

    It tries one change at a time, the cheapest first, until some fit. If none does: all changes that need no
    more ranks together, and if that does not fit, with as many ranks as were tried. Changes that leave more
    weights and optimizer state on a rank than fit are not tried alone. found: the plan of `cfg` as it is.
    step, frozen_config: as of `dry_run`.
    """
    held = found.resting[memory.PARAMETERS] + found.resting[memory.OPTIMIZER]
    if held > (1 - HEADROOM) * device.memory_bytes:
        yield f"weights and optimizer state alone take {size_text(held)} on a rank"
    yield "planned instead, one change at a time:"
    num_fitting = 0
    possible: Remedy = {}
    for change in _changes(cfg, world_size):
        if _holds_more_than_fits(change, held, world_size, device):
            possible |= change
            continue
        try:
            planned = _plan(cfg, change, model_config, world_size, device, step, frozen_config)
        except UserError:  # this run cannot use it, for example ranks that do not divide the model
            continue
        possible |= change
        yield _line(change, planned, device)
        num_fitting += fits(planned.peak_bytes, device)
        if num_fitting == _ENOUGH:
            return
    if num_fitting:
        return
    here = {key: value for key, value in possible.items() if key != _RANKS}
    for together in (here, possible) if here != possible else (here,):
        if len(together) < 2:
            continue
        with suppress(UserError):  # these changes may exclude each other
            planned = _plan(cfg, together, model_config, world_size, device, step, frozen_config)
            yield _line(together, planned, device)
            if fits(planned.peak_bytes, device):
                return


def _holds_more_than_fits(change: Remedy, held: int, world_size: int, device: Device) -> bool:
    """Whether the weights and the optimizer state of a rank, `held` before `change`, are too large for the
    device after it.
    """
    if change.keys() & {"parallel.cpu_offload", "parallel.replicate"}:
        return False
    held_then = held * world_size / int(change.get(_RANKS, world_size))
    return held_then > (1 - HEADROOM) * device.memory_bytes


def _changes(cfg: RunConfig, world_size: int) -> Iterator[Remedy]:
    parallel = cfg.parallel
    if not parallel.reshards(world_size):
        yield {"parallel.reshard_after_forward": True}
    num_micro_batches = cfg.global_batch_size // cfg.micro_batch_size
    num_data_ranks = world_size // parallel.tensor
    shards = num_data_ranks > parallel.replicate  # one rank has nothing to shard
    if shards and num_micro_batches > num_data_ranks and not parallel.reduce_every_micro_batch:
        yield {"parallel.reduce_every_micro_batch": True}
    if parallel.replicate > 1:
        yield {"parallel.replicate": 1}
    if cfg.micro_batch_size > 1:
        yield {"micro_batch_size": 1}
    if cfg.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    times = 2
    while times <= _MOST_TIMES:
        if num_micro_batches % (times * num_data_ranks) == 0:
            yield {_RANKS: times * world_size}
        times *= 2
    if not parallel.cpu_offload:
        change: Remedy = {"parallel.cpu_offload": True}
        if not shards and num_micro_batches > num_data_ranks and not parallel.reduce_every_micro_batch:
            # Otherwise gradients add up on the GPU, and move to the host after the last micro-batch.
            change["parallel.reduce_every_micro_batch"] = True
        yield change


def _plan(
    cfg: RunConfig,
    change: Remedy,
    model_config: models.Facts,
    world_size: int,
    device: Device,
    step: PlannedStep,
    frozen_config: models.Facts | None,
) -> DryRun:
    in_parallel = {key.partition(".")[2]: change[key] for key in change if key.startswith("parallel.")}
    at_top = {key: value for key, value in change.items() if key != _RANKS and "." not in key}
    parallel = dataclasses.replace(cfg.parallel, **in_parallel)  # type: ignore[arg-type]
    changed = dataclasses.replace(cfg, parallel=parallel, **at_top)  # type: ignore[arg-type]
    num_ranks = int(change.get(_RANKS, world_size))
    return dry_run(changed, model_config, num_ranks, device, step=step, frozen_config=frozen_config)


def _line(change: Remedy, found: DryRun, device: Device) -> str:
    words = [
        f"{key} {value}" if key == _RANKS else f"{key}={str(value).lower()}" for key, value in change.items()
    ]
    host = f" and {size_text(found.host_bytes)} of host memory" if found.host_bytes else ""
    end = "fits" if fits(found.peak_bytes, device) else "does not fit"
    return f"  {' '.join(words)}: a peak of {size_text(found.peak_bytes)}{host} a rank, {end}"
