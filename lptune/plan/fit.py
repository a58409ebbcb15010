"""Does a run fit its GPU, and if not, which change makes it fit? Each answer comes from a dry run.

A GPU is taken to hold a plan whose peak leaves a tenth of its memory free: for CUDA's context, NCCL's
buffers, kernels' workspaces and fragmentation, none of which a plan counts.

A dry run takes a second or two, and there are some twenty changes with their combinations. So most that
cannot fit are told without one, from what is known: the bytes of weights, gradients and optimizer are counted
from shapes (training/lasting.py), and activations are no fewer than in a plan that saves at least as much of
them (`_Search.at_least`). That never leaves out a change that fits.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from lptune import linear, models
from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.config import OPTIMIZER_KINDS, PRECISION_KINDS, OptimizerConfig, RunConfig
from lptune.hardware.devices import Device
from lptune.plan import memory
from lptune.plan.dry_run import DryRun, dry_run
from lptune.training.lasting import lasting
from lptune.training.planned import PlannedStep

HEADROOM = 0.1
"""Share of the GPU's memory that must stay free."""
_ENOUGH = 2
"""After this many remedies that fit, no other is tried."""
_MOST_TIMES = 16
"""Largest number of ranks that is tried, as a multiple of the given number."""
_RANKS, _OFFLOAD = "--world-size", "parallel.cpu_offload"
_IN_BACKWARD, _MOMENTS = "optimizer.in_backward", "optimizer.cpu_offload"
_RESHARD, _EVERY = "parallel.reshard_after_forward", "parallel.reduce_every_micro_batch"

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
_NO_MASTER: Remedy = {"optimizer.master": "none"}


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


@dataclasses.dataclass(frozen=True)
class Tried:
    """A change, and the plan with it."""

    change: Remedy
    cfg: RunConfig  # with the change
    rows_before: int  # global_batch_size without it
    found: DryRun
    fits: bool

    @property
    def changes_rows(self) -> bool:
        """Whether it needs another global_batch_size: then it is another training, too."""
        return self.cfg.global_batch_size != self.rows_before

    @property
    def keys(self) -> dict[str, bool | int | str]:
        """The keys of the config that it changes, with their values."""
        keys = {key: value for key, value in self.change.items() if key != _RANKS}
        return keys | ({"global_batch_size": self.cfg.global_batch_size} if self.changes_rows else {})

    @property
    def words(self) -> str:
        """What a user types, in one line."""
        parts = ((key, str(value).lower()) for key, value in (self.change | self.keys).items())
        return " ".join(f"{key} {value}" if key == _RANKS else f"{key}={value}" for key, value in parts)

    @property
    def line(self) -> str:
        """What a user types, the peak, and what is known of its cost."""
        peak, host = size_text(self.found.peak_bytes), self.found.host_bytes
        host_text = f" and {size_text(host)} of host memory" if host else ""
        is_other = bool(self.change.keys() & {"optimizer.kind", "optimizer.master"})
        end = ("fits" if self.fits else "does not fit") + f" ({_cost(self.cfg.optimizer)})" * is_other
        if self.fits and self.changes_rows:
            rows = "1 row" if self.cfg.global_batch_size == 1 else f"{self.cfg.global_batch_size} rows"
            end += f"; a step has {rows} and not {self.rows_before}: that trains differently"
        return f"  {self.words}: a peak of {peak}{host_text} a rank, {end}"


def heading(found: DryRun, device: Device) -> list[str]:
    """The lines before those of `remedies`."""
    held = found.resting[memory.PARAMETERS] + found.resting[memory.OPTIMIZER]
    too_much = held > (1 - HEADROOM) * device.memory_bytes
    alone = [f"weights and optimizer state alone take {size_text(held)} on a rank"] if too_much else []
    return [*alone, "planned instead:"]


def remedies(
    cfg: RunConfig,
    model_config: models.Facts,
    world_size: int,
    device: Device,
    found: DryRun,
    step: PlannedStep = PlannedStep(),  # noqa: B008  (frozen)
    frozen_config: models.Facts | None = None,
    *,
    same_ranks: bool = False,
    host_bytes: float = math.inf,
) -> Iterator[Tried]:
    """Tries changes by dry runs; yields each when it is done.

    It tries one change at a time, the cheapest first, until some fit. If none does of those that need neither
    host memory nor more ranks: these together. If nothing does, or only with other rows in a step: with host
    memory, then also with more ranks.
    Of changes that fit together, those that are not needed are left out again, the most expensive first.
    Where they then change the rows of a step, those that keep them are tried, too.
    Changes that cannot fit are not tried. found: the plan of `cfg` as it is. step, frozen_config: as of
    `dry_run`. same_ranks: without more ranks. host_bytes: that a rank may take of its host.
    """
    search = _Search(cfg, model_config, world_size, device, found, step, frozen_config, host_bytes)
    num_fitting = 0
    possible, tried = list[Remedy](), list[Remedy]()
    changes = [each for each in _changes(cfg, world_size) if not (same_ranks and _RANKS in each)]
    for _, group in itertools.groupby(changes, _needs_more):
        for change in group:
            possible.append(change)
            if search.at_least(change, found, cfg) > search.limit:
                continue
            try:
                result = search.tried(change)
            except UserError:  # this run cannot use it, for example ranks that do not divide the model
                possible.remove(change)
                continue
            tried.append(change)
            yield result
            num_fitting += result.fits and not result.changes_rows
            if num_fitting == _ENOUGH:
                return
        for together in ([each for each in possible if _RANKS not in each], possible):
            if num_fitting or (remedy := search.joined(together)) in tried:
                continue
            tried.append(remedy)
            with suppress(UserError):  # these changes may exclude each other
                remedy = search.fewest(together)
                if not remedy or remedy in tried[:-1]:
                    continue
                tried.append(remedy)
                yield (result := search.tried(remedy))
                num_fitting += result.fits and not result.changes_rows
                keeping = [each for each in together if _IN_BACKWARD not in each]
                if result.fits and result.changes_rows and search.tried(search.joined(keeping)).fits:
                    tried.append(search.fewest(keeping))
                    yield search.tried(tried[-1])
                    num_fitting += 1


@dataclasses.dataclass
class _Search:
    """The plans of changes of one config, and what is known without them."""

    cfg: RunConfig
    model_config: models.Facts
    world_size: int
    device: Device
    found: DryRun
    step: PlannedStep
    frozen_config: models.Facts | None
    host_bytes: float = math.inf
    known: dict[frozenset[tuple[str, bool | int | str]], Tried] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = (1 - HEADROOM) * self.device.memory_bytes
        self.model = models.build_on_meta(self.model_config)
        models.freeze(self.model, self.cfg.freeze)
        if PRECISION_KINDS[self.cfg.precision.kind].stores_low:
            linear.convert(self.model, self.cfg.precision)

    def tried(self, change: Remedy) -> Tried:
        """The plan of `change`. Raises UserError for what the config, the mesh or the model refuses."""
        key = frozenset(change.items())
        if key not in self.known:
            num_ranks = int(change.get(_RANKS, self.world_size))
            cfg = _changed(self.cfg, change, num_ranks)
            found = dry_run(
                cfg,
                self.model_config,
                num_ranks,
                self.device,
                step=self.step,
                frozen_config=self.frozen_config,
            )
            enough = fits(found.peak_bytes, self.device) and found.host_bytes <= self.host_bytes
            self.known[key] = Tried(change, cfg, self.cfg.global_batch_size, found, enough)
        return self.known[key]

    def at_least(self, change: Remedy, below: DryRun, its_cfg: RunConfig) -> float:
        """Bytes that the peak with `change` is not below; 0 where the config refuses it.

        below: the plan of `its_cfg`, which saves at least as much of the activations. They, and gradients of
        earlier micro-batches, lie beside weights and optimizer in forward; all gradients do in the update.
        """
        num_ranks = int(change.get(_RANKS, self.world_size))
        try:
            cfg = _changed(self.cfg, change, num_ranks)
            cfg.check_ranks(num_ranks)
        except UserError:
            return 0  # `tried` finds out
        alike = cfg.precision.all_gather == its_cfg.precision.all_gather
        recomputes = cfg.activation_checkpointing == "full" != its_cfg.activation_checkpointing
        fewer = recomputes or cfg.micro_batch_size < its_cfg.micro_batch_size
        activations = below.peaks["forward"][memory.ACTIVATIONS] if alike and not fewer else 0
        if cfg.parallel.cpu_offload:
            return activations
        # What the plan found and the difference by count: so a second, frozen model is in it.
        now, then = (lasting(self.model, *each) for each in ((self.cfg, self.world_size), (cfg, num_ranks)))
        resting = self.found.resting
        held = resting[memory.PARAMETERS] + then.weights - now.weights
        if not cfg.optimizer.cpu_offload:
            held += resting[memory.OPTIMIZER] + then.optimizer - now.optimizer
        held += resting[memory.TEACHER] * self.world_size // num_ranks
        gradients = self.found.peaks["update"][memory.GRADIENTS] + then.gradients - now.gradients
        rows = cfg.micro_batch_size * cfg.parallel.data_ranks(num_ranks)
        accumulated = gradients if cfg.global_batch_size > rows else 0
        return held + max(gradients, accumulated + activations)

    def joined(self, changes: Sequence[Remedy]) -> Remedy:
        """All of them; of one key the last value. With weights in host memory without what then saves nothing
        on the GPU; and on one rank without FSDP where there is no copy of the weights that it could free.
        """
        joined = {key: value for change in changes for key, value in change.items()}
        if _OFFLOAD in joined:
            joined.pop(_MOMENTS, None)
            if math.isinf(self.host_bytes):
                joined.pop(_IN_BACKWARD, None)
        elif self.world_size == joined.get(_RANKS, 1) == 1 and _NO_MASTER.items() <= joined.items():
            joined = {key: value for key, value in joined.items() if key not in (_RESHARD, _EVERY)}
        return joined

    def fewest(self, changes: Sequence[Remedy]) -> Remedy:
        """The changes together, without those that they fit without and those that do not lower the peak
        (with optimizer.master=none there is no copy of the weights to free). The last is left out first: of a
        key with several values the value before it is then left.
        """
        kept, best = list(changes), self.tried(self.joined(changes))
        # Every micro-batch brings all weights from the host: then a smaller one is what costs most.
        offloads = any(_OFFLOAD in change for change in changes)
        while True:
            did_fit = best.fits
            dearest_first = [*reversed(kept)]
            dearest_first.sort(key=lambda each: not (offloads and "micro_batch_size" in each))
            for change in dearest_first:
                fewer = [each for each in kept if each is not change]
                if self.joined(fewer) == self.joined(kept):  # a value that another one replaces
                    kept = fewer
                    continue
                if not _is_measured(self.joined(fewer)):
                    fewer = [each for each in fewer if each.keys() != change.keys()]
                enough = max(self.limit, best.found.peak_bytes)
                if self.at_least(self.joined(fewer), best.found, best.cfg) > enough:
                    continue
                with suppress(UserError):
                    result = self.tried(self.joined(fewer))
                    if result.fits or _is_no_larger(result.found, best.found):
                        kept, best = fewer, result
            if did_fit or not best.fits:
                return self.joined(kept)


def _is_no_larger(one: DryRun, other: DryRun) -> bool:
    return one.peak_bytes <= other.peak_bytes and one.host_bytes <= other.host_bytes


def _needs_more(change: Remedy) -> bool:
    """Whether it needs what the run does not have: host memory or more ranks."""
    return bool(change.keys() & {_RANKS, _OFFLOAD, _MOMENTS})


def _is_measured(change: Remedy) -> bool:
    """False for another optimizer.kind and optimizer.master that nobody tried together."""
    both = change.get("optimizer.kind"), change.get("optimizer.master")
    return None in both or both in MEASURED_COSTS


def _changes(cfg: RunConfig, world_size: int) -> Iterator[Remedy]:
    """The cheapest first. What does not change an update comes before another optimizer, except for a second
    forward of every block, which takes more time than an update, and for an update in backward, which clips
    otherwise and allows one micro-batch. What the config refuses is among them.
    """
    parallel = cfg.parallel
    num_micro_batches = cfg.global_batch_size // cfg.micro_batch_size
    num_data_ranks = parallel.data_ranks(world_size)
    shards = world_size // parallel.tensor > parallel.replicate  # one rank has nothing to shard
    every: Remedy = {}
    if num_micro_batches > num_data_ranks and not parallel.reduce_every_micro_batch:
        every = {_EVERY: True}
    # With FSDP on one rank the gradients of micro-batches add up unreduced beside those of the parameters.
    with_fsdp: Remedy = {} if shards else every
    if not parallel.reshards(world_size):
        yield {_RESHARD: True} | with_fsdp
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
        yield _NO_MASTER
    if world_size == 1 and cfg.precision.gathers_low:
        # Copies in 8 bits are half of those of float32 weights, but lie beside bfloat16 ones.
        yield ({} if cfg.optimizer.master == "none" else _NO_MASTER) | {"precision.all_gather": "high"}
    if not cfg.optimizer.in_backward:
        yield {_IN_BACKWARD: True}  # the last that is wanted: it may need another global batch
    if not (cfg.optimizer.cpu_offload or parallel.cpu_offload):
        yield {_MOMENTS: True} | _without_copies(cfg)
    times = 2
    while times <= _MOST_TIMES:
        if num_micro_batches % (times * num_data_ranks) == 0:
            yield {_RANKS: times * world_size}
        times *= 2
    if not parallel.cpu_offload:
        # Otherwise gradients add up on the GPU, and move to the host after the last micro-batch.
        yield {_OFFLOAD: True} | with_fsdp | _without_copies(cfg)


def _without_copies(cfg: RunConfig) -> Remedy:
    """A save in the background copies weights and moments to the host, where they are already."""
    return {"checkpoint.async_save": False} if cfg.checkpoint.async_save else {}


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
    rows = changed.micro_batch_size * changed.parallel.data_ranks(num_ranks)
    return dataclasses.replace(changed, global_batch_size=rows)


def _cost(optimizer: OptimizerConfig) -> str:
    """What was measured of it against AdamW in float32."""
    loss, times = MEASURED_COSTS.get((optimizer.kind, optimizer.master), ("not measured", None))
    update = f", update {times} times as long on a CPU" if times else ""
    return f"held-out loss against adamw, on a model of 0.66 M parameters: {loss}{update}"
