"""Times a model's linear layers in every kind, and the rest of its training step once, on this device.

    groups   linear layers that read one input, each beside the same layers in `none`: forward and
             backward of a micro-batch with quantization; and their update, which makes the compute weights
    rest     one block of each kind of block, with embedding, head and loss, in `none`

All of it goes through the verbs of a recipe (convert, parallelize, LowPrecision, Update), compiled and
recomputed as the config says, on one rank; the first step of each is verified, so what is timed did run in 8
bits. The kinds and `none` take turns. Of several rounds the fastest counts: other load only adds time.

The time is bounded: a shorter micro-batch is timed if the whole one would not leave time to compile
(`timed_tokens`), and after `seconds` nothing new begins. The rest and the largest group are always timed.

q, k and v read one x, and so do gate and up: compiled, x is quantized once for all of them. Timed one by one,
each would pay for it, and low precision would look slower than it is in a step. Groups with the same shapes
are timed once and counted.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lptune import distributed, linear, models, training
from lptune.base import progress
from lptune.base.errors import UserError
from lptune.base.text import size_text
from lptune.config import OPTIMIZER_KINDS, ParallelConfig, PrecisionConfig, RunConfig
from lptune.distributed import World
from lptune.hardware.host_memory import available_bytes

READ_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
"""Names of sibling modules that usually read one x: in Hugging Face's decoders, and in BERT's family."""


class Shape(NamedTuple):
    """A linear layer: K in_features, N out_features."""

    name: str
    """The last component of its name: `q_proj`."""
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class Group:
    """Linear layers that read one input, and how often the model has them."""

    shapes: tuple[Shape, ...]
    modules: tuple[str, ...]
    """The names of the modules that hold them: `model.layers.0.self_attn`."""

    @property
    def count(self) -> int:
        """How often the model has the group."""
        return len(self.modules)

    @property
    def label(self) -> str:
        """The names without what they share: `q,k,v`, `down`."""
        return ",".join(shape.name.removesuffix("_proj") for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """Number of weights of one group, without biases."""
        return sum(shape.in_features * shape.out_features for shape in self.shapes)

    @property
    def out_text(self) -> str:
        """The output sizes, equal ones counted: `2048+2x1024`."""
        sizes = [shape.out_features for shape in self.shapes]
        counts = {size: sizes.count(size) for size in sizes}
        return "+".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in counts.items())


def groups_of(model: nn.Module, plan: linear.Plan) -> list[Group]:
    """The groups of the layers that `plan` converted, those with the most FLOPs in a model first.

    model: the one that was converted, also on meta.
    """
    converted = {layer.name for layer in plan.converted}
    found: dict[tuple[Shape, ...], list[str]] = {}
    for name, module in model.named_modules():
        children = {leaf: child for leaf, child in module.named_children() if isinstance(child, nn.Linear)}
        names = [leaf for leaf in children if f"{name}.{leaf}".lstrip(".") in converted]
        for together in _together(names):
            shapes = tuple(_shape(leaf, children[leaf]) for leaf in together)
            found.setdefault(shapes, []).append(name)
    groups = [Group(shapes, tuple(modules)) for shapes, modules in found.items()]
    return sorted(groups, key=lambda group: -group.num_weights * group.count)


def _shape(name: str, module: nn.Linear) -> Shape:
    return Shape(name, module.in_features, module.out_features, module.bias is not None)


def _together(names: list[str]) -> list[list[str]]:
    """`names` of one module, by the input that they read."""
    groups: list[list[str]] = []
    left = list(names)
    for readers in READ_ONE_INPUT:
        group = [name for name in readers if name in left]
        if group:
            groups.append(group)
            left = [name for name in left if name not in group]
    return [*groups, *([name] for name in left)]


LEAST_ROUNDS, MOST_ROUNDS = 4, 12
_WARM_UP = 1
_LEAST_TOKENS = 64
_SHARE_OF_GEMMS = 0.5
"""Of the given time. The other half is for compiling."""
_MANY_GRAPHS = 64
_PROBED_ROWS = 1024


class Times(NamedTuple):
    """Seconds of one training step with one micro-batch."""

    pass_s: float
    """Forward and backward."""
    update_s: float
    """Norm, clipping, optimizer, and the copies that the next forward multiplies."""


class Pair(NamedTuple):
    """A group in low precision and in `none`, timed in turns."""

    low: Times
    none: Times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was timed. Times of passes are of `timed_tokens` tokens."""

    groups: tuple[Group, ...]
    """All groups of the model, the largest first."""
    kinds: tuple[str, ...]
    """Those that were to be timed, without `none`."""
    pairs: dict[tuple[Group, str], Pair]
    """Those that there was time for."""
    blocks_s: float
    """Forward and backward of all blocks in `none`."""
    head_s: float
    """Of embedding, last norm, head and loss."""
    update_s: float
    """Of one block of each kind and the head, in `none`."""
    update_blocks: tuple[Group, ...]
    """The groups that were in that update, one for each time."""
    tokens: int
    """Of a micro-batch."""
    timed_tokens: int
    duration_s: float


class _Quiet:
    """The part of a World that LowPrecision uses, without the line that it prints when a step is verified."""

    def __init__(self, world: World) -> None:
        self.device, self.token_size, self.max_ = world.device, world.token_size, world.max_

    def print(self, text: str) -> None:
        """Prints nothing."""


class _Readers(nn.Module):
    """Linear layers that read one x, under the names that they have in the model."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        super().__init__()
        self.names = tuple(shape.name for shape in shapes)
        for shape in shapes:
            layer = nn.Linear(shape.in_features, shape.out_features, shape.has_bias, device=device)
            self.add_module(shape.name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.get_submodule(name)(x) for name in self.names]


def measure(
    cfg: RunConfig,
    model_config: models.Facts,
    kinds: Sequence[str],
    seconds: float,
    world: World,
    step: training.PlannedStep = training.PlannedStep(),  # noqa: B008  (frozen)
) -> Measured:
    """Times the linear layers of the model in each of `kinds`, and the rest of a step.

    kinds: without `none`; each is native here. seconds: after them nothing new begins. world: of one rank.
    step: what the recipe plans.

    Raises UserError if the memory does not hold one block and the head, or if `precision.skip` leaves no
    layer.
    """
    started = time.monotonic()
    model = models.build_on_meta(model_config)
    plan = linear.convert(model, precision_of(cfg.precision, kinds[0]), device=world.device)
    groups = groups_of(model, plan)
    cfg = dataclasses.replace(cfg, parallel=ParallelConfig())
    _check_memory(model_config, cfg, world.device)
    rows, seq_len = _timed_rows(cfg, model_config, len(kinds), seconds, world.device)
    pairs: dict[tuple[Group, str], Pair] = {}
    with torch._dynamo.config.patch(
        recompile_limit=_MANY_GRAPHS,
        accumulated_recompile_limit=16 * _MANY_GRAPHS,
        fail_on_recompile_limit_hit=True,
    ):
        with progress.in_place("timing a block and the head in none ..."):
            blocks_s, head_s, update_s, distinct = _rest(cfg, step, model_config, rows, seq_len, world)
        torch._dynamo.reset()
        for number, group in enumerate(groups):
            left_s = seconds - (time.monotonic() - started)
            if left_s <= 0 and number > 0:
                break
            where = f"{number + 1} of {len(groups)}, {max(0, left_s):.0f} s left"
            with progress.in_place(f"timing {group.label} in {len(kinds) + 1} kinds ({where}) ..."):
                share_s = left_s / (len(groups) - number)
                for kind, pair in _pairs(group, kinds, cfg, rows, seq_len, world, share_s).items():
                    pairs[group, kind] = pair
            torch._dynamo.reset()  # the graphs of this group serve no other
    return Measured(
        groups=tuple(groups),
        kinds=tuple(kinds),
        pairs=pairs,
        blocks_s=blocks_s,
        head_s=head_s,
        update_s=update_s,
        update_blocks=_groups_in(groups, distinct),
        tokens=cfg.tokens_per_forward,
        timed_tokens=rows * seq_len,
        duration_s=time.monotonic() - started,
    )


def precision_of(given: PrecisionConfig, kind: str) -> PrecisionConfig:
    """`given` with another kind. Options that this kind does not have are left at their defaults."""
    chosen = {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}
    chosen |= {"kind": kind, "skip_small": False, "emulate": False}
    with suppress(UserError):
        return PrecisionConfig(**chosen)
    kept = PrecisionConfig(kind=kind)
    for name, value in chosen.items():  # all but those that the kind refuses
        with suppress(UserError):
            kept = dataclasses.replace(kept, **{name: value})
    return kept


def _groups_in(groups: Sequence[Group], blocks: Sequence[int]) -> tuple[Group, ...]:
    """The groups of the blocks with these numbers, one for each time that a block has it."""
    return tuple(
        group
        for group in groups
        for module in group.modules
        if any(module.startswith(f"model.layers.{number}.") for number in blocks)
    )


def _rest(
    cfg: RunConfig,
    planned: training.PlannedStep,
    config: models.Facts,
    rows: int,
    seq_len: int,
    world: World,
) -> tuple[float, float, float, list[int]]:
    """Seconds of: all blocks, what is no block, the update of what was built; and the blocks in it."""
    distinct = config.one_of_each()
    model = models.build_on_meta(config.with_layers(distinct))
    plan = linear.convert(model, PrecisionConfig(kind="none"), device=world.device)
    distributed.parallelize(model, world, cfg)
    distributed.materialize(model, world, cfg)
    model.init_weights(cfg.seed)
    inputs: dict[nn.Module, tuple[object, ...]] = {}
    hooks = [block.register_forward_pre_hook(inputs.__setitem__) for block in model.blocks]
    tokens_BS = torch.randint(config.vocab_size, (rows, seq_len), device=world.device)
    documents = models.DocumentBounds.single(rows, seq_len, world.device)
    objective = planned.loss(None, tokens_BS, documents, cfg)

    def one_pass() -> None:
        loss = model(tokens_BS, documents, tokens_BS, objective).sum()
        (loss / tokens_BS.numel()).backward()

    step = _stepper(model, plan, cfg, world, one_pass)
    step()
    for hook in hooks:
        hook.remove()
    whole = _fastest([step(), *(step() for _ in range(LEAST_ROUNDS - 1))])
    weights = linear.ComputeWeights.of(model)
    blocks = []
    for number, block in zip(distinct, model.blocks, strict=True):
        if weights is not None:
            weights.put_in_place()
        count = sum(layer == config.layers[number] for layer in config.layers)
        blocks.append((count, _block_s(block, inputs[block], world.device)))
    model.zero_grad(set_to_none=True)
    once = sum(seconds for _, seconds in blocks)
    return (
        sum(count * seconds for count, seconds in blocks),
        max(0.0, whole.pass_s - once),
        whole.update_s,
        distinct,
    )


def _block_s(block: nn.Module, inputs: tuple[object, ...], device: torch.device) -> float:
    hidden_BSH, *others = inputs
    assert isinstance(hidden_BSH, Tensor)
    hidden_BSH = hidden_BSH.detach().requires_grad_()
    grad_BSH = torch.randn_like(hidden_BSH)
    times = []
    for _ in range(_WARM_UP + LEAST_ROUNDS):
        hidden_BSH.grad = None
        started = _now(device)
        block(hidden_BSH, *others).backward(grad_BSH)
        times.append(_now(device) - started)
    return min(times[_WARM_UP:])


def _bytes_per_weight(cfg: RunConfig) -> float:
    """Weight, gradient and moments; and of a float32 weight the compute weight with its gradient."""
    kind = OPTIMIZER_KINDS[cfg.optimizer.kind]
    return kind.num_moments * kind.num_bits / 8 + (4 if cfg.optimizer.master == "none" else 12)


def _pairs(
    group: Group,
    kinds: Sequence[str],
    cfg: RunConfig,
    rows: int,
    seq_len: int,
    world: World,
    seconds: float,
) -> dict[str, Pair]:
    """The times of `group` in each of `kinds` and in `none`, in turns, for about `seconds`.

    As many kinds take turns as the memory holds: they all are there at once.
    """
    free = _free_bytes(world.device)
    needed = _bytes_per_weight(cfg) * group.num_weights
    at_once = len(kinds) if free is None else int(0.8 * free / needed) - 1
    at_once = max(1, min(at_once, len(kinds)))
    found: dict[str, Pair] = {}
    for first in range(0, len(kinds), at_once):
        names = ["none", *kinds[first : first + at_once]]
        times = _turns(
            {name: _group_step(group, name, cfg, rows, seq_len, world) for name in names},
            seconds * len(names) / (len(kinds) + 1),
        )
        found |= {name: Pair(times[name], times["none"]) for name in names[1:]}
    return found


def _turns(steps: dict[str, Callable[[], Times]], seconds: float) -> dict[str, Times]:
    """The fastest of several rounds of each of `steps`. Each round begins with another one."""
    started = time.monotonic()
    for step in steps.values():
        for _ in range(_WARM_UP + 1):
            step()
    order, rounds = list(steps), {name: list[Times]() for name in steps}
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() - started > seconds:
            break
        for name in order:
            rounds[name].append(steps[name]())
        order = order[1:] + order[:1]
    return {name: _fastest(times) for name, times in rounds.items()}


def _group_step(
    group: Group, kind: str, cfg: RunConfig, rows: int, seq_len: int, world: World
) -> Callable[[], Times]:
    readers = _Readers(group.shapes, world.device)
    precision = dataclasses.replace(precision_of(cfg.precision, kind), skip=())
    plan = linear.convert(readers, precision, device=world.device, num_tokens=rows * seq_len)
    distributed.parallelize(readers, world, cfg, blocks=[readers])
    dtype = getattr(torch, cfg.compute_dtype)
    size = (rows, seq_len, group.shapes[0].in_features)
    x_BSK = torch.randn(size, dtype=dtype, device=world.device, requires_grad=True)
    grads = [
        torch.randn(*size[:2], shape.out_features, dtype=dtype, device=world.device) for shape in group.shapes
    ]

    def one_pass() -> None:
        x_BSK.grad = None
        torch.autograd.backward(readers(x_BSK), grads)

    return _stepper(readers, plan, cfg, world, one_pass)


def _stepper(
    model: nn.Module, plan: linear.Plan, cfg: RunConfig, world: World, one_pass: Callable[[], None]
) -> Callable[[], Times]:
    """A training step of `model`, parallelized, with one pass. The first one is verified against the plan."""
    optimizer = training.build_optimizer(model, dataclasses.replace(cfg.optimizer, ema_decay=0.0), cfg.seed)
    low = linear.LowPrecision(model, plan, optimizer, world=_Quiet(world), seed=cfg.seed)
    update = training.Update(model, optimizer, world, cfg.max_grad_norm, low)
    numbers: Iterator[int] = iter(range(1 << 30))
    loss_sum = torch.zeros((), device=world.device)

    def step() -> Times:
        distributed.sync_gradients(model, is_last=True)
        with low.step(next(numbers), num_passes=1):
            low.micro_batch(0)
            started = _now(world.device)
            one_pass()
            pass_s = _now(world.device) - started
        started = _now(world.device)
        update(loss_sum, 1.0)
        # Copied now, so that the time belongs to the update, once in a step, and not to a pass.
        if (weights := linear.ComputeWeights.of(model)) is not None:
            weights.put_in_place()
        return Times(pass_s, _now(world.device) - started)

    return step


def _fastest(times: Sequence[Times]) -> Times:
    return Times(min(each.pass_s for each in times), min(each.update_s for each in times))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _timed_rows(
    cfg: RunConfig, config: models.Facts, num_kinds: int, seconds: float, device: torch.device
) -> tuple[int, int]:
    """(rows, tokens of a row) of the micro-batch that is timed: fewer than in the config, if GEMMs would
    otherwise take more than their share of the time.
    """
    rows, seq_len = cfg.micro_batch_size, cfg.data.seq_len
    block, head = _weights(config)
    # A pass reads each weight for three GEMMs. The rest runs blocks twice.
    passes = (LEAST_ROUNDS + _WARM_UP + 1) * (2 * block + head + (num_kinds + 1) * block)
    most = _SHARE_OF_GEMMS * seconds * _flops(config.hidden_size, cfg, device) / (6 * passes)
    while rows * seq_len > max(most, _LEAST_TOKENS) and rows > 1:
        rows = math.ceil(rows / 2)
    while seq_len > max(most, _LEAST_TOKENS):
        seq_len //= 2
    return rows, max(1, seq_len)


def _weights(config: models.Facts) -> tuple[int, int]:
    """Weights of one block of each kind, and of the head."""
    small = models.build_on_meta(config.with_layers(config.one_of_each()))
    head = config.vocab_size * config.hidden_size
    return sum(parameter.numel() for parameter in small.blocks.parameters()), head


def _flops(hidden: int, cfg: RunConfig, device: torch.device) -> float:
    """FLOP/s of a GEMM in the compute dtype."""
    a = torch.randn(_PROBED_ROWS, hidden, dtype=getattr(torch, cfg.compute_dtype), device=device)
    b = torch.randn(hidden, hidden, dtype=a.dtype, device=device)
    times = []
    for _ in range(6):
        started = _now(device)
        a @ b
        times.append(_now(device) - started)
    return 2 * _PROBED_ROWS * hidden * hidden / min(times)


def _check_memory(config: models.Facts, cfg: RunConfig, device: torch.device) -> None:
    block, head = _weights(config)
    needed = _bytes_per_weight(cfg) * (block + (1 if config.tied else 2) * head)
    free = _free_bytes(device)
    if free is not None and needed > free:
        raise UserError(
            f"advise: one block and the head of this model take {size_text(needed)} in training, and "
            f"{size_text(free)} are free here; name the GPU of the run with --device for a prediction"
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
