"""Does a run fit its GPU, and if not, which change makes it fit? Each answer comes from a dry run.

A GPU is taken to hold a plan whose peak leaves a tenth of its memory free: for CUDA's context, NCCL's
buffers, kernels' workspaces and fragmentation, none of which a plan counts.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from lptune import models
from lptune.config import RunConfig, UserError, size_text
from lptune.hardware.devices import Device
from lptune.training.dry_run import DryRun, dry_run

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
    model_config: models.DecoderConfig,
    world_size: int,
    device: Device,
    teacher_config: models.DecoderConfig | None = None,
) -> Iterator[str]:
    """Tries changes by dry runs; yields a line for each when it is done: its peak, and whether it fits.

    It tries one change at a time, the cheapest first, until some fit; if none does, all changes together.
    """
    changes, num_fitting = _changes(cfg, world_size), 0
    possible: Remedy = {}
    for change in changes:
        try:
            found = _plan(cfg, change, model_config, world_size, device, teacher_config)
        except UserError:  # this run cannot use it, for example ranks that do not divide the model
            continue
        possible |= change
        yield _line(change, found, device)
        num_fitting += fits(found.peak_bytes, device)
        if num_fitting == _ENOUGH:
            return
    if num_fitting == 0 and len(possible) > 1:
        with suppress(UserError):  # these changes may exclude each other
            found = _plan(cfg, possible, model_config, world_size, device, teacher_config)
            yield _line(possible, found, device)


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
        yield {"parallel.cpu_offload": True}


def _plan(
    cfg: RunConfig,
    change: Remedy,
    model_config: models.DecoderConfig,
    world_size: int,
    device: Device,
    teacher_config: models.DecoderConfig | None,
) -> DryRun:
    in_parallel = {key.partition(".")[2]: change[key] for key in change if key.startswith("parallel.")}
    at_top = {key: value for key, value in change.items() if key != _RANKS and "." not in key}
    parallel = dataclasses.replace(cfg.parallel, **in_parallel)  # type: ignore[arg-type]
    changed = dataclasses.replace(cfg, parallel=parallel, **at_top)  # type: ignore[arg-type]
    num_ranks = int(change.get(_RANKS, world_size))
    return dry_run(changed, model_config, num_ranks, device, teacher_config=teacher_config)


def _line(change: Remedy, found: DryRun, device: Device) -> str:
    words = [
        f"{key} {value}" if key == _RANKS else f"{key}={str(value).lower()}" for key, value in change.items()
    ]
    host = f" and {size_text(found.host_bytes)} of host memory" if found.host_bytes else ""
    end = "fits" if fits(found.peak_bytes, device) else "does not fit"
    return f"  {' '.join(words)}: a peak of {size_text(found.peak_bytes)}{host} a rank, {end}"
