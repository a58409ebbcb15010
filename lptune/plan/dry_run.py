"""A dry run: one training step on any number of ranks, on one machine, without weights, data or a GPU.

    found = dry_run(cfg, model_config, world_size=512)
    print(found.report())

A dry run executes the code of training: the model is built on meta, converted, parallelized and sharded over
a mesh; it gets an optimizer and runs forward and backward. But the process group is torch's fake one, in
which this process is rank 0 and collectives return at once, and tensors are fake: they have a shape, a dtype
and the size of a storage, but no values. All storages (memory.py) and all collectives are counted: this is
what a rank would hold and exchange.

A dry run does not see torch.compile, whose fused blocks keep less than the eager blocks that run here; nor
what the allocator, NCCL, the CUDA context and the workspaces of kernels add; nor time.

Most blocks are alike: one of each kind runs, and what it allocated, freed and exchanged is repeated for the
others (repeated_blocks.py). Most micro-batches are alike, so at most three run: the first, one in the middle,
and the last, which reduces the gradients. The collectives of the middle one are multiplied.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lptune import distributed, linear, models
from lptune.base.errors import UserError
from lptune.base.text import flop_text, size_text, table, wrapped
from lptune.config import ParallelConfig, RunConfig
from lptune.distributed import Collectives, World
from lptune.hardware.devices import Device
from lptune.hardware.planned import planned_for
from lptune.kernels import choose_backend
from lptune.plan import memory
from lptune.plan.repeated_blocks import Blocks, Repeated, leave_out
from lptune.training import muon
from lptune.training.in_backward import UpdateInBackward, build_update
from lptune.training.listed import ListsMoments
from lptune.training.optimizer import build_optimizer
from lptune.training.planned import PlannedStep

STAGED = "shards between host and GPU"
_WIDTH, _HANG = 80, 2
_OFFLOADED = (memory.PARAMETERS, memory.TEACHER, memory.GRADIENTS, memory.OPTIMIZER)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Memory and collectives of a step, for each rank."""

    cfg: RunConfig
    plan: linear.Plan
    mesh: dict[str, int]
    """Axis -> its size, outermost first."""
    attention: str
    num_parameters: int
    checkpoint_bytes: int
    """Bytes of a checkpoint, over all ranks: weights and what the optimizer lists."""
    num_micro_batches: int
    """Number of micro-batches per rank and step."""
    attention_flops: float
    """FLOPs per token in all attention layers, if each row is one document."""
    peaks: dict[str, Counter[str]]
    """Phase of the step -> bytes by category at its peak."""
    resting: Counter[str]
    """Bytes by category between two steps."""
    host_bytes: int
    """Bytes that `parallel.cpu_offload` or `optimizer.cpu_offload` keeps in host memory, as pinned memory
    takes them; with the copies of checkpoint.async_save.
    """
    copies_bytes: int
    """Bytes of host memory that the copies of checkpoint.async_save take, likewise; 0 without it."""
    device: Device | None
    """The planned GPU; None: a CPU, or any GPU."""
    collectives: Collectives
    """Collectives of forward and backward of all micro-batches, and of the update."""
    first_collectives: Collectives
    """Those of the first step of a run, which has no amax history to go by; the same for most kinds."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`, which `auto` means here."""
        return "cpu" if self.cfg.device == "cpu" else "cuda"

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that a rank holds at a time."""
        return max(found.total() for found in self.peaks.values())

    def report(self) -> str:
        """The precision, the memory and the collectives as text, with tables of at most 80 columns."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        if (shared := self.cfg.parallel.context) > 1:
            axes += f", each row on {shared} ranks"
        if (shared := self.cfg.parallel.expert) > 1:
            axes += f", experts on {shared} ranks"
        ranks, tokens = torch.Size(self.mesh.values()).numel(), self.cfg.tokens_per_step
        lines = [
            *precision_lines(self.plan),
            "",
            *_in_parts(
                f"{ranks} x {self.device.name if self.device else self.device_type}, mesh {axes}; "
                f"{_count_text(self.num_parameters)} parameters;",
                f"attention by {self.attention}",
            ),
            *_in_parts(
                f"a step: {tokens:,} tokens, micro-batches a rank: {self.num_micro_batches};",
                f"{flop_text(self.plan.flops_per_token)} a token in linear layers",
                f"and {flop_text(self.attention_flops)} in attention (recomputation apart)",
            ),
            "",
            *_memory_table(self),
            "",
            *_collectives_table(self),
            "",
            *_notes(self),
        ]
        return "\n".join(lines)


def dry_run(
    cfg: RunConfig,
    model_config: models.Facts,
    world_size: int,
    device: Device | None = None,
    *,
    step: PlannedStep = PlannedStep(),  # noqa: B008  (frozen)
    frozen_config: models.Facts | None = None,
    in_full: bool = False,
) -> DryRun:
    """Dry run of one step of `cfg` on `world_size` ranks. cfg.device: `auto` means cuda.

    device: the GPU of each rank, which decides the choice of kernels; None: any Hopper. step: of the recipe.
    frozen_config: of its second model (`PlannedStep.frozen`); None leaves that out. in_full: run all blocks,
    which takes longer and gives the same.

    Reads neither cfg.model.path nor data: each row is one document of full length. Needs a process without
    a process group. Raises the same UserErrors as a run for the mesh and the precision.
    """
    if cfg.optimizer.in_backward:
        cfg.check_ranks(world_size)
    device_type = "cpu" if cfg.device == "cpu" else "cuda"
    offloads = cfg.parallel.cpu_offload
    if offloads and device_type == "cpu":
        raise UserError("parallel.cpu_offload: a CPU has no other memory to move to; set it to false")
    parallel = cfg.parallel
    eager = dataclasses.replace(cfg, compile="none", parallel=parallel)
    with fake_world(parallel, world_size) as world, as_on(device_type, device):
        model = models.build_on_meta(model_config)
        models.freeze(model, cfg.freeze)
        num_parameters = models.num_parameters(model)
        plan = linear.convert(
            model, cfg.precision, device=torch.device(device_type), num_tokens=cfg.tokens_per_forward
        )
        reach = len(model_config.layers) if in_full else max(1, parallel.prefetch_blocks)
        blocks = {model: leave_out(model, reach)}
        distributed.parallelize(model, world, eager)
        if not cfg.parallel.reshards(world_size):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False, recurse=False)
        frozen = None
        if frozen_config is not None:
            if frozen_config.vocab_size != model_config.vocab_size:
                raise UserError(
                    f"{step.frozen}: has vocab_size {frozen_config.vocab_size}, the model that is trained "
                    f"{model_config.vocab_size}; choose a model with as many words"
                )
            frozen = models.build_on_meta(frozen_config)
            blocks[frozen] = leave_out(frozen, len(frozen_config.layers) if in_full else reach)
            step.build_frozen(frozen, eager, world)
        num_micro_batches = cfg.global_batch_size // cfg.micro_batch_size // world.data_size
        # Without FSDP nothing is reduced: the last micro-batch is like those in the middle.
        most = 3 if in_full or distributed.uses_fsdp(parallel, world_size) else 2
        num_run = min(most, num_micro_batches)
        with ExitStack() as stack:
            # Layer handles are real tensors: their values identify a layer.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            axes = distributed.axis_names(world.mesh, world.context, world.experts)
            log = stack.enter_context(memory.MemoryLog(axes))
            compute_dtype = getattr(torch, cfg.compute_dtype)
            backend = model.attention_backend(world.device, compute_dtype, seq_len=cfg.data.seq_len)
            try:
                first, collectives, resting, state_bytes, pinned = _run_steps(
                    model, step, frozen, blocks, plan, world, eager, num_micro_batches, num_run, log
                )
            except DataDependentOutputException as error:
                raise UserError(
                    f"{model_config.family!r} reads values of tensors ({error}), which a dry run has not; it "
                    "cannot be planned"
                ) from None
            offloaded: tuple[str, ...] = ()
            if device_type == "cuda" and (offloads or cfg.optimizer.cpu_offload):
                offloaded = _OFFLOADED if offloads else (memory.OPTIMIZER,)
            # Where backward updates, it makes the state of the optimizer, which later steps find.
            made = (memory.OPTIMIZER,) if cfg.optimizer.in_backward else ()
            peaks = _in_later_steps(log.peaks(regardless_of={*made, *offloaded}), resting)
            for held in (*peaks.values(), resting):
                for name in offloaded:
                    del held[name]
            if offloads:
                _add_staged(peaks, list(blocks), in_backward=cfg.optimizer.in_backward)
            return DryRun(
                cfg=cfg,
                plan=plan,
                mesh=distributed.mesh_axes(cfg.parallel, world_size),
                attention=backend,
                num_parameters=num_parameters,
                checkpoint_bytes=state_bytes,
                num_micro_batches=num_micro_batches,
                attention_flops=model_config.attention_flops([cfg.data.seq_len]) / cfg.data.seq_len,
                peaks=peaks,
                resting=resting,
                host_bytes=_host_bytes(pinned, offloaded, cfg),
                copies_bytes=_copies_bytes(pinned, cfg),
                device=device,
                collectives=collectives,
                first_collectives=first,
            )


class _Steps(NamedTuple):
    first_collectives: Collectives
    collectives: Collectives
    """Those of later steps."""
    resting: Counter[str]
    """Bytes by category after the last step."""
    state_bytes: int
    """Of weights and the optimizer's state in a checkpoint, over all ranks."""
    pinned: Counter[str]
    """What the tensors of each category would take in host memory."""


def _run_steps(
    model: models.Backbone,
    planned: PlannedStep,
    frozen: models.Backbone | None,
    blocks: Mapping[models.Backbone, Blocks],
    plan: linear.Plan,
    world: World,
    cfg: RunConfig,
    num_micro_batches: int,
    num_run: int,
    log: memory.MemoryLog,
) -> _Steps:
    """Allocates `model` and `frozen`, which are on meta, and runs the first step as a recipe does, under
    `log`; and the second, where that exchanges something else.

    `num_run` micro-batches run. Collectives are counted for all `num_micro_batches`.
    """
    log.phase("start")
    distributed.materialize(model, world, cfg)
    log.label(memory.PARAMETERS, model.parameters())
    if frozen is not None:
        distributed.materialize(frozen, world, cfg)
        log.label(memory.TEACHER, frozen.parameters())
    times = dict[nn.Parameter, int]()
    for part, its_blocks in blocks.items():
        times |= its_blocks.parameters(part)
        its_blocks.watch(part, functools.partial(log.block, its_blocks))
    log.repeat(times, lambda parameter: parameter)
    optimizer = build_optimizer(model, cfg.optimizer, cfg.seed)
    low = linear.LowPrecision(model, plan, optimizer, world=world, verify=False)  # no GEMM executes
    low.leave_out(blocks[model].layers)
    in_float32 = _Float32Groups(log)
    for part in blocks:
        in_float32.find(part, times)
    whole = Repeated(model, times)
    if cfg.optimizer.in_backward:
        for parameter in model.parameters():
            if parameter.requires_grad:  # the update, whose hook comes after this one, frees it
                parameter.register_post_accumulate_grad_hook(
                    lambda each: log.label(memory.GRADIENTS, [each.grad])
                )
    update = build_update(whole, optimizer, world, cfg, low)
    tokens_BS = torch.zeros(cfg.micro_batch_size, cfg.data.seq_len, dtype=torch.int64, device=world.device)
    documents = models.DocumentBounds.single(cfg.micro_batch_size, cfg.data.seq_len, world.device)

    totals = list[Collectives]()
    for step in range(2 if low.first_step_agrees else 1):
        totals.append(total := Collectives())
        with low.step(step, num_passes=num_run):
            loss_sum = torch.zeros((), device=world.device)
            for number in distributed.accumulate(model, range(num_run), world, cfg, low):
                log.collectives.clear()
                log.phase("forward")
                objective = planned.loss(frozen, tokens_BS, documents, cfg)
                if frozen is not None:
                    log.phase("forward")  # ends what its last block does
                loss = model(tokens_BS, documents, tokens_BS, objective).sum()
                in_float32.gathered()
                update.before_backward(loss)
                log.phase("backward")
                (loss * (world.data_size / tokens_BS.numel())).backward()
                loss_sum += loss.detach()
                stands_for = num_micro_batches - 2 if num_run == 3 and number == 1 else 1
                total.update({each: count * stands_for for each, count in log.collectives.items()})
            log.collectives.clear()
        for each in (model, frozen):
            if (weights := linear.ComputeWeights.of(each)) is not None:
                copies = weights.copies()
                log.label(memory.GATHERED, list(copies.values()))
                log.repeat(times, copies.get)
        log.label(memory.GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
        log.repeat(times, lambda parameter: parameter.grad)
        if isinstance(update, UpdateInBackward):
            log.repeat(times, update.norm_of)
        log.phase("update")
        update.launch(loss_sum, tokens_BS.numel())  # without the look at the loss, which has no value here
        if isinstance(optimizer, muon.Muon) and not cfg.optimizer.in_backward:
            _count_exchanges(log.collectives, optimizer, times)
        total.update(log.collectives)
        log.label(memory.OPTIMIZER, (list(state.values()) for state in optimizer.state.values()))
        log.repeat(times, lambda parameter: list(optimizer.state.get(parameter, {}).values()))
    assert isinstance(optimizer, ListsMoments)
    state_bytes, pinned = 0, Counter[str]()
    for parameter in whole.parameters():
        kept = optimizer.moment_keys(parameter) if parameter in optimizer.state else ()
        moments = [optimizer.state[parameter][key] for key in kept]
        state_bytes += sum(each.numel() * each.dtype.itemsize for each in (parameter, *moments))
        pinned[memory.PARAMETERS] += memory.pinned_bytes([parameter])
        pinned[memory.OPTIMIZER] += memory.pinned_bytes(moments)
        if parameter.requires_grad and not cfg.optimizer.in_backward:
            here = distributed.on_this_rank(parameter)  # in float32 also where the weight is stored in INT8
            pinned[memory.GRADIENTS] += memory.pinned_size(here.numel() * here.dtype.itemsize)
    if frozen is not None:
        pinned[memory.TEACHER] += memory.pinned_bytes(Repeated(frozen, times).parameters())
    return _Steps(totals[0], totals[-1], log.at_end(), state_bytes, pinned)


def _host_bytes(pinned: Counter[str], offloaded: tuple[str, ...], cfg: RunConfig) -> int:
    """What a rank holds in host memory; and, if that is anything, the copies for a save in the background."""
    held = sum(pinned[name] for name in offloaded)
    return held + (_copies_bytes(pinned, cfg) if held else 0)


def _copies_bytes(pinned: Counter[str], cfg: RunConfig) -> int:
    return (pinned[memory.PARAMETERS] + pinned[memory.OPTIMIZER]) * cfg.checkpoint.async_save


def _count_exchanges(counted: Collectives, optimizer: muon.Muon, times: Mapping[nn.Parameter, int]) -> None:
    """Replaces the all-to-alls of the blocks that ran by those of the whole model, which turns of other
    matrices share.
    """
    ran = [each for each in counted if each.operation == "all_to_all"]
    matrices = [p for p in optimizer.stacked for _ in range(times.get(p, 1))]
    for each in ran:
        del counted[each]
    for num_elements in muon.exchanges(matrices) if ran else ():
        size = num_elements * getattr(torch, ran[0].dtype).itemsize
        counted[ran[0]._replace(num_bytes=size)] += 1


@dataclasses.dataclass
class _Float32Groups:
    """The float32 parameters of all blocks, which one all-gather brings before the first block, and one
    reduce-scatter reduces after backward (distributed/parallelize.py): `log` counts them for the blocks that
    were left out, too.
    """

    log: memory.MemoryLog
    places: list[tuple[nn.Module, str, int]] = dataclasses.field(default_factory=list)
    """Module, name of the parameter in it, and for how many it stands."""

    def find(self, model: models.Backbone, times: Mapping[nn.Parameter, int]) -> None:
        """Comes after `parallelize`, before a forward."""
        for group in linear.fsdp_groups(model):
            if not group.in_float32:
                continue
            own = {id(each) for each in group.parameters}
            self.places += [
                (module, name, times[each])
                for module in model.modules()
                for name, each in module.named_parameters(recurse=False)
                if id(each) in own and each in times
            ]
            mesh = group.parameters[0].device_mesh  # type: ignore[attr-defined]
            num_ranks, whole = mesh.size(mesh.ndim - 1), dict[int, int]()
            for parameters in (group.parameters, [each for each in group.parameters if each.requires_grad]):
                sizes = [(4 * linear.padded_numel(each), times.get(each, 1)) for each in parameters]  # type: ignore[arg-type]
                here, there = sum(size for size, _ in sizes), sum(size * count for size, count in sizes)
                whole |= {here: there, here // num_ranks: there // num_ranks}
            self.log.span_collectives(whole)

    def gathered(self) -> None:
        """Comes after each forward."""
        for module, name, count in self.places:
            weight = module.get_parameter(name)
            self.log.span_blocks(weight, count)
            if weight.requires_grad and not weight._post_accumulate_grad_hooks:
                weight.register_post_accumulate_grad_hook(
                    lambda weight, count=count: self.log.span_blocks(weight.grad, count, replayed=True)
                )


@contextmanager
def fake_world(parallel: ParallelConfig, world_size: int) -> Iterator[World]:
    """This process as rank 0 of `world_size` ranks that do not exist. The device is the CPU, so that torch
    without CUDA can run it; `planned_for` makes lptune decide as on a GPU.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized()
    axes = distributed.mesh_axes(parallel, world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        sharing = distributed.neighbours(parallel, mesh)
        yield World(rank=0, size=world_size, device=torch.device("cpu"), mesh=mesh, **sharing)
    finally:
        distributed.destroy_process_group()


def _in_later_steps(peaks: dict[str, Counter[str]], resting: Counter[str]) -> dict[str, Counter[str]]:
    """The peaks of later steps: the optimizer state, made in the first update, is added to all phases."""
    state = Counter({memory.OPTIMIZER: resting[memory.OPTIMIZER]})
    return {name: peaks[name] | state for name in ("forward", "backward", "update")}


def _add_staged(peaks: dict[str, Counter[str]], parts: list[models.Backbone], *, in_backward: bool) -> None:
    """Adds what is copied between host and GPU. FSDP2 copies the shards of a module to the GPU for a gather,
    while those of the previous module are still there, and copies gradients to the host, from where an update
    in backward brings them again. The largest module counts.
    """
    groups = [group for part in parts for group in linear.fsdp_groups(part)]
    largest = max(memory.storage_bytes(group.parameters) for group in groups)
    peaks["forward"][STAGED] = 2 * largest
    peaks["backward"][STAGED] = (4 if in_backward else 3) * largest


@contextmanager
def as_on(device_type: str, device: Device | None) -> Iterator[None]:
    """Decides kernels as on `device`; None: any GPU, or a CPU, as device_type says."""
    # Kernels are chosen once per process and differ between GPUs, so the choice is cleared.
    choose_backend.cache_clear()
    try:
        with planned_for(device_type, *((device.capability, device.name) if device else ())):
            yield
    finally:
        choose_backend.cache_clear()


# ---- the text


def precision_lines(plan: linear.Plan) -> list[str]:
    """The precision plan in few lines. Layers whose GEMMs and gather are alike share a heading; of their rows
    those with one shape are one. A run prints and stores the whole table.
    """
    lines = plan.table().splitlines()
    summary = wrapped(lines[0], hang=_HANG)
    frozen = [line for line in lines[1:] if line.startswith("frozen")]
    if not plan.converted:
        return [*summary, *(part for line in frozen for part in wrapped(line))]
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for layer in plan.layers:
        shape, *how = layer.columns()
        leaf = layer.name.rpartition(".")[2]
        key = (*how, layer.reason or "")
        rows.setdefault(key, {}).setdefault(shape, []).append(leaf)
    width = 2 + max(14, *(len(shape) for shapes in rows.values() for shape in shapes))
    for (output, grad_input, grad_weight, gather, reason), shapes in rows.items():
        if reason:
            summary += wrapped(f"high precision, {reason}:", hang=_HANG)
        else:
            summary += _in_parts(
                f"output {output},",
                f"grad_input {grad_input},",
                f"grad_weight {grad_weight},",
                f"all-gather (FSDP) {gather}:",
            )
        for shape, leaves in shapes.items():
            counts = [(name, leaves.count(name)) for name in dict.fromkeys(leaves)]
            names = [name if count == 1 else f"{count} {name}" for name, count in counts]
            summary += wrapped(f"{shape:<{width}}{', '.join(names)}", indent=2, hang=_HANG)
    return [*summary, *(part for line in frozen for part in wrapped(line))]


def _in_parts(*parts: str) -> list[str]:
    """`parts` in lines; a line ends between two parts, where it can."""
    glued = [part if len(part) > _WIDTH - _HANG else part.replace(" ", "\xa0") for part in parts]
    return [line.replace("\xa0", " ") for line in wrapped(" ".join(glued), _WIDTH, hang=_HANG)]


def _memory_table(found: DryRun) -> list[str]:
    columns = {**found.peaks, "afterwards": found.resting}
    unit, size = ("GiB", 2**30) if found.peak_bytes >= 2**30 else ("MiB", 2**20)
    names = [name for name in (*memory.CATEGORIES, STAGED) if any(held[name] for held in columns.values())]
    rows = [[name, *(f"{held[name] / size:,.2f}" for held in columns.values())] for name in names]
    rows.append(["sum", *(f"{held.total() / size:,.2f}" for held in columns.values())])
    return table([[f"peak memory of a rank, {unit}", *columns], *rows], "<>", rule=True)


def _collectives_table(found: DryRun) -> list[str]:
    sizes = {
        **found.mesh,
        "context": found.cfg.parallel.context,
        "expert": found.cfg.parallel.expert,
        **{f"{axis} of experts": size for axis, size in found.mesh.items()},
        "fsdp of experts": found.mesh["fsdp"] // found.cfg.parallel.expert,
        "all": torch.Size(found.mesh.values()).numel(),
    }
    rows = [
        [operation, dtype, f"{axis} ({sizes.get(axis, '?')})", f"{calls:,}", size_text(num_bytes)]
        for operation, dtype, axis, calls, num_bytes in found.collectives.rows()
    ]
    header = ["collectives of a step", "dtype", "axis (ranks)", "calls", "bytes"]
    return table([header, *rows], "<>", rule=True) if rows else ["collectives of a step: none"]


def _notes(found: DryRun) -> list[str]:
    notes = []
    if found.collectives:
        notes.append(
            "an all-gather's bytes are those of the gathered buffer, a reduce-scatter's of what is cut up"
        )
    if found.cfg.parallel.expert > 1:
        notes.append("all experts get equally many tokens here: uneven routing moves more, and keeps more")
    if found.cfg.compile != "none":
        notes.append("blocks ran eagerly here: compiled ones keep fewer activations and temporaries")
    if found.device_type == "cuda":
        notes.append("CUDA's context, NCCL's buffers, kernels' workspaces and fragmentation come on top")
    if more := found.first_collectives - found.collectives:
        calls, num_bytes = more.total(), sum(each.num_bytes * count for each, count in more.items())
        notes.append(
            f"the first step of a run has no amax history, and {calls:,} collectives more "
            f"({size_text(num_bytes)})"
        )
    if found.host_bytes:
        key, held = "optimizer", "the optimizer state"
        if found.cfg.parallel.cpu_offload:
            key, held = "parallel", "parameters, gradients and optimizer state"
        copies = "; with the copies of checkpoint.async_save" * found.cfg.checkpoint.async_save
        notes.append(
            f"{key}.cpu_offload: {held} of each rank take {found.host_bytes / 1e9:,.1f} GB of host memory, "
            f"pinned, a power of two for each tensor{copies}"
        )
    elif found.copies_bytes and found.device_type == "cuda":
        notes.append(
            f"checkpoint.async_save: copies of a rank's weights and optimizer state take "
            f"{found.copies_bytes / 1e9:,.1f} GB of host memory, pinned, a power of two for each tensor"
        )
    return [line for note in notes for line in wrapped(note, hang=_HANG)]


def _count_text(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.2f} million"
