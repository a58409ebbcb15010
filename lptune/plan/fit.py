"""Does a run fit its GPU, and if not, which change makes it fit? Each answer comes from a dry run.

A GPU is taken to hold a plan whose peak leaves a tenth of its memory free: for CUDA's context, NCCL's
buffers, kernels' workspaces and fragmentation, none of which a plan counts.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from lptune import models
from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.config import OPTIMIZER_KINDS, OptimizerConfig, RunConfig
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
_RANKS, _OFFLOAD = "--world-size", "parallel.cpu_offload"
_IN_BACKWARD = "optimizer.in_backward"

MEASURED_COSTS = {
    ("adamw_bf16", "float32"): ("-0.0001 ± 0.0003", 2.8),
    ("adamw_8bit", "float32"): ("-0.0009 ± 0.0002", 10.8),
    ("adamw", "none"): ("+0.0007 ± 0.0013", None),
    ("adamw_8bit", "none"): ("0.0000 ± 0.0012", None),
}
"""optimizer.kind, optimizer.master -> by how much the held-out loss differs from that of `adamw`, and how
many times as long an update takes on one CPU core, if that was measured (docs/optimizers.md)."""

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

    It tries one change at a time, the cheapest first, until some fit. If none does of those that need neither
    host memory nor more ranks: these together. If nothing does: with host memory, then also with more ranks.
    Of changes that fit together, those that are not needed are left out again, the most expensive first.
    Changes that leave more weights and optimizer state on a rank than fit are not tried alone. found: the
    plan of `cfg` as it is. step, frozen_config: as of `dry_run`.
    """
    held = found.resting[memory.PARAMETERS] + found.resting[memory.OPTIMIZER]
    if held > (1 - HEADROOM) * device.memory_bytes:
        yield f"weights and optimizer state alone take {size_text(held)} on a rank"
    yield "planned instead, one change at a time:"

    known: dict[frozenset[tuple[str, bool | int | str]], DryRun] = {}

    def plan(change: Remedy) -> DryRun:
        key = frozenset(change.items())
        if key not in known:
            known[key] = _plan(cfg, change, model_config, world_size, device, step, frozen_config)
        return known[key]

    num_fitting = 0
    possible, tried = list[Remedy](), list[Remedy]()
    for _, group in itertools.groupby(_changes(cfg, world_size), _needs_more):
        for change in group:
            if _holds_more_than_fits(change, held, world_size, device):
                possible.append(change)
                continue
            try:
                planned = plan(change)
            except UserError:  # this run cannot use it, for example ranks that do not divide the model
                continue
            possible.append(change)
            tried.append(change)
            yield _line(cfg, change, world_size, planned, device)
            num_fitting += fits(planned.peak_bytes, device)
            if num_fitting == _ENOUGH:
                return
        for together in ([each for each in possible if _RANKS not in each], possible):
            if num_fitting or (remedy := _joined(together)) in tried:
                continue
            tried.append(remedy)
            with suppress(UserError):  # these changes may exclude each other
                remedy, planned = _fewest(together, plan, device)
                if not remedy or remedy in tried[:-1]:
                    continue
                yield _line(cfg, remedy, world_size, planned, device)
                num_fitting += fits(planned.peak_bytes, device)


def _needs_more(change: Remedy) -> bool:
    """Whether it needs what the run does not have: host memory or more ranks."""
    return bool(change.keys() & {_RANKS, _OFFLOAD})


def _joined(changes: Sequence[Remedy]) -> Remedy:
    """All of them; of one key the last value. Without the update in backward if that would be on the host."""
    joined = {key: value for change in changes for key, value in change.items()}
    if _OFFLOAD in joined:
        joined.pop(_IN_BACKWARD, None)
    return joined


def _is_measured(change: Remedy) -> bool:
    """False for another optimizer.kind and optimizer.master that nobody tried together."""
    both = change.get("optimizer.kind"), change.get("optimizer.master")
    return None in both or both in MEASURED_COSTS


def _fewest(
    changes: Sequence[Remedy], plan: Callable[[Remedy], DryRun], device: Device
) -> tuple[Remedy, DryRun]:
    """The changes together, without those that they fit without and those that do not lower the peak (with
    optimizer.master=none there is no copy of the weights to free), and their plan. The last is left out
    first: of a key with several values the value before it is then left.
    """
    kept, planned = list(changes), plan(_joined(changes))
    while True:
        did_fit = fits(planned.peak_bytes, device)
        for change in reversed(kept):
            fewer = [each for each in kept if each is not change]
            if _joined(fewer) == _joined(kept):  # a value that another one replaces
                kept = fewer
                continue
            if not _is_measured(_joined(fewer)):
                fewer = [each for each in fewer if each.keys() != change.keys()]
            with suppress(UserError):
                found = plan(_joined(fewer))
                if fits(found.peak_bytes, device) or found.peak_bytes <= planned.peak_bytes:
                    kept, planned = fewer, found
        if did_fit or not fits(planned.peak_bytes, device):
            return _joined(kept), planned


def _holds_more_than_fits(change: Remedy, held: int, world_size: int, device: Device) -> bool:
    """Whether the weights and the optimizer state of a rank, `held` before `change`, are too large for the
    device after it.
    """
    if change.keys() & {_OFFLOAD, "parallel.replicate", "optimizer.kind", "optimizer.master"}:
        return False
    held_then = held * world_size / int(change.get(_RANKS, world_size))
    return held_then > (1 - HEADROOM) * device.memory_bytes


def _changes(cfg: RunConfig, world_size: int) -> Iterator[Remedy]:
    """The cheapest first. What does not change an update comes before another optimizer, except for a second
    forward of every block, which takes more time than an update, and for an update in backward, which clips
    otherwise and allows one micro-batch. What the config refuses is among them.
    """
    parallel = cfg.parallel
    num_micro_batches = cfg.global_batch_size // cfg.micro_batch_size
    num_data_ranks = world_size // parallel.tensor
    shards = num_data_ranks > parallel.replicate  # one rank has nothing to shard
    every: Remedy = {}
    if num_micro_batches > num_data_ranks and not parallel.reduce_every_micro_batch:
        every = {"parallel.reduce_every_micro_batch": True}
    # With FSDP on one rank the gradients of micro-batches add up unreduced beside those of the parameters.
    with_fsdp: Remedy = {} if shards else every
    if not parallel.reshards(world_size):
        yield {"parallel.reshard_after_forward": True} | with_fsdp
    if shards and every:
        yield every
    if parallel.replicate > 1:
        yield {"parallel.replicate": 1}
    if cfg.micro_batch_size > 1:
        yield {"micro_batch_size": 1}
    now = OPTIMIZER_KINDS[cfg.optimizer.kind]
    for kind, each in OPTIMIZER_KINDS.items():
        if each.moments == now.moments and each.num_bits < now.num_bits:
            yield {"optimizer.kind": kind}
    if cfg.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    if cfg.optimizer.master != "none":
        yield {"optimizer.master": "none"}
    if not cfg.optimizer.in_backward:
        yield {_IN_BACKWARD: True}  # the last that is wanted: it may need another global batch
    times = 2
    while times <= _MOST_TIMES:
        if num_micro_batches % (times * num_data_ranks) == 0:
            yield {_RANKS: times * world_size}
        times *= 2
    if not parallel.cpu_offload:
        # Otherwise gradients add up on the GPU, and move to the host after the last micro-batch.
        yield {_OFFLOAD: True} | with_fsdp


def _plan(
    cfg: RunConfig,
    change: Remedy,
    model_config: models.Facts,
    world_size: int,
    device: Device,
    step: PlannedStep,
    frozen_config: models.Facts | None,
) -> DryRun:
    num_ranks = int(change.get(_RANKS, world_size))
    changed = _changed(cfg, change, num_ranks)
    return dry_run(changed, model_config, num_ranks, device, step=step, frozen_config=frozen_config)


def _changed(cfg: RunConfig, change: Remedy, num_ranks: int) -> RunConfig:
    """`cfg` with the keys of `change`, and with a global batch of one micro-batch a rank if backward updates.
    Raises UserError for what the config refuses.
    """
    values: dict[str, object] = {}
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        if section:
            values[section] = dataclasses.replace(
                values.get(section, getattr(cfg, section)),  # type: ignore[type-var]
                **{name: value},
            )
        elif key != _RANKS:
            values[key] = value
    changed = dataclasses.replace(cfg, **values)  # type: ignore[arg-type]
    if not changed.optimizer.in_backward:
        return changed
    rows = changed.micro_batch_size * (num_ranks // changed.parallel.tensor)
    return dataclasses.replace(changed, global_batch_size=rows)


def _line(cfg: RunConfig, change: Remedy, world_size: int, found: DryRun, device: Device) -> str:
    words = [
        f"{key} {value}" if key == _RANKS else f"{key}={str(value).lower()}" for key, value in change.items()
    ]
    changed = _changed(cfg, change, int(change.get(_RANKS, world_size)))
    if changed.global_batch_size != cfg.global_batch_size:
        words.append(f"global_batch_size={changed.global_batch_size}")
    host = f" and {size_text(found.host_bytes)} of host memory" if found.host_bytes else ""
    end = "fits" if fits(found.peak_bytes, device) else "does not fit"
    cost = ""
    if change.keys() & {"optimizer.kind", "optimizer.master"}:
        cost = f" ({_cost(changed.optimizer)})"
    return f"  {' '.join(words)}: a peak of {size_text(found.peak_bytes)}{host} a rank, {end}{cost}"


def _cost(optimizer: OptimizerConfig) -> str:
    """What was measured of it against AdamW in float32."""
    loss, times = MEASURED_COSTS.get((optimizer.kind, optimizer.master), ("not measured", None))
    update = f", update {times} times as long on a CPU" if times else ""
    return f"held-out loss against adamw: {loss}{update}"
