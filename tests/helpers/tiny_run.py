"""The training loop of recipes/full_finetune.py around a tiny model, for tests on any number of ranks.

The loss is the recipe's own function; the loop around it stands here once more.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lptune import data, distributed, linear, models, training
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from lptune.linear.weights.int8_weight import quantized
from lptune.training import optimizer

NUM_MICRO_BATCHES = 4
"""Of a step, over all ranks."""


def config(
    kind: str, *, lr: float = 1e-3, precision: dict[str, Any] | None = None, **keys: Any
) -> FinetuneConfig:
    """A FinetuneConfig of `kind` in every layer, float8 emulated; eager and float32 unless `keys` differ."""
    values: dict[str, Any] = {
        "model": ModelConfig(path="unused"),
        "data": DataConfig(source="unused"),
        "precision": PrecisionConfig(
            kind=kind, emulate=not kind.startswith("int8"), skip=(), **(precision or {})
        ),
        "optimizer": OptimizerConfig(lr=lr, weight_decay=0.1),
        "compute_dtype": "float32",
        "compile": "none",
        "activation_checkpointing": "none",
    }
    return FinetuneConfig(**(values | keys))


def decoder_config(**content: Any) -> models.DecoderConfig:
    """llama3_1/tiny: two blocks of hidden size 64, q, k, v and gate, up as one layer each (quicker)."""
    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"]) | content
    return dataclasses.replace(models.config_from_dict(preset, "tiny"), fused_projections=True)


def micro_batch(step: int, number: int, seed: int, *, num_rows: int = 2, seq_len: int = 32) -> data.Batch:
    """Rows of random tokens, two documents and padding each, with a number of targets of its own."""
    generator = torch.Generator().manual_seed(1000 * (1000 * seed + step) + number)
    tokens_BS = torch.randint(0, 128, (num_rows, seq_len), generator=generator)
    first, second = seq_len // 3 + number, seq_len - 2 - number
    place_S = torch.arange(seq_len)
    document_S = (place_S >= first).long() + (place_S >= second)
    positions_S = place_S - torch.tensor([0, first, second])[document_S]
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[:, [first - 1, second - 1]] = data.rows.IGNORE
    labels_BS[:, second:] = data.rows.IGNORE
    starts = torch.tensor([0, first, second])
    offsets = torch.cat(
        [row * seq_len + starts for row in range(num_rows)] + [torch.tensor([num_rows * seq_len])]
    )
    return data.Batch(
        tokens_BS,
        labels_BS,
        positions_S.expand(num_rows, seq_len),
        document_S.expand(num_rows, seq_len),
        offsets.int(),
        int((labels_BS != data.rows.IGNORE).sum()),
        one_document_per_row=False,
        source_BS=torch.zeros_like(tokens_BS),
        numbers_D=torch.full((len(offsets) - 1,), -1),
    )


def alone_beside(world: distributed.World) -> distributed.World:
    """The first rank's own world of one, within a session of several. A collective: all ranks make the mesh.

    Its axis is named after the session's mesh. A process that opens one session after the other finds what
    DTensor has cached under an equal mesh of an earlier one, and with it that mesh's process group, by name.
    Equal meshes have groups of equal names as long as equal ones were made before.
    """
    name = "_".join(["alone_beside", *map(str, world.mesh.shape)])
    return distributed.World(0, 1, world.device, DeviceMesh("cpu", [0], mesh_dim_names=(name,)))


class Step(NamedTuple):
    """What forward and backward of one step gave."""

    loss: float
    """Mean over all targets of all ranks."""
    verified: linear.Verified


class TinyRun:
    """Model, optimizer and everything else that the recipe holds during training."""

    def __init__(
        self,
        cfg: FinetuneConfig,
        world: distributed.World,
        content: models.DecoderConfig,
        *,
        seed: int = 0,
        freeze: Callable[[models.Decoder], None] | None = None,
    ) -> None:
        self.cfg, self.world, self.seed = cfg, world, seed
        self.model = models.build_on_meta(content)
        self.plan = linear.convert(self.model, cfg.precision)
        if freeze is not None:
            freeze(self.model)
        distributed.parallelize(self.model, world, cfg)
        distributed.materialize(self.model, world, cfg)
        self.optimizer = training.build_optimizer(self.model, cfg.optimizer, cfg.seed)
        self.low = linear.LowPrecision(
            self.model, self.plan, self.optimizer, world=world, seed=cfg.seed, verify=False
        )
        self.fill({name: self.model.initial_value(name, seed) for name, _ in self.model.named_parameters()})

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        """Sets every parameter from its whole value, an Int8Weight's from one of those or from floats."""
        distributed.reshard(self.model)
        fused = distributed.fused_rows(self.model)
        for name, parameter in self.model.named_parameters():
            for piece in distributed.local_pieces(parameter, fused.get(name, ())):
                values_here, (rows, *others) = piece.values, piece.region
                part = values[name][rows]
                if part.dim() > 1 and part.shape[1] != values_here.shape[1]:
                    part = part[:, others[0]]
                values_here.copy_(part)
        linear.weights_changed(self.model)

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """The whole of every parameter, to the bit; an Int8Weight's as floats where it may be cut by columns.

        A collective.
        """
        distributed.reshard(self.model)
        fused = distributed.fused_rows(self.model)
        found = {}
        for name, parameter in self.model.named_parameters():
            rows = fused.get(name, ())
            floats = distributed.full_tensor(linear.dequantized(parameter), rows).clone()
            if linear.int8_rows(parameter) is not None and self.world.ranks_per_row == 1:
                floats = quantized(floats, distributed.full_tensor(linear.row_scales(parameter), rows))
            found[name] = floats
        return found

    def gradients(self) -> dict[str, Tensor]:
        """The whole of every gradient. A collective."""
        fused = distributed.fused_rows(self.model)
        return {
            name: distributed.full_tensor(parameter.grad, fused.get(name, ())).clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def batches(self, step: int) -> list[data.Batch]:
        """This rank's micro-batches, dealt out as data.Loader does."""
        share = NUM_MICRO_BATCHES // self.world.data_size
        first = self.world.data_rank * share
        return [micro_batch(step, number, self.seed) for number in range(first, first + share)]

    def num_targets(self, step: int) -> int:
        """Of all ranks."""
        return sum(micro_batch(step, number, self.seed).num_targets for number in range(NUM_MICRO_BATCHES))

    def forward_backward(self, step: int) -> float:
        """The recipe's forward_backward over the micro-batches of a step; the mean loss.

        Within `low.step()`.
        """
        num_targets = float(self.num_targets(step))
        loss_sum = forward_backward(
            self.model, self.batches(step), num_targets, self.cfg, self.world, self.low
        )
        return self.world.sum(loss_sum) / num_targets

    def verified_step(self, step: int) -> Step:
        """The same, verified, as a run's first step is; within `low.step()`."""
        with linear.verify_step(self.model, self.plan, len(self.batches(step))) as verified:
            loss = self.forward_backward(step)
        return Step(loss, verified)

    def summed_gradients(self, step: int) -> dict[str, "Summed"]:
        """What any number of ranks must have as gradients of `step`, from its micro-batches one by one.

        Of a run on one rank, in place of `forward_backward` and within `low.step()` too.
        """
        assert self.world.data_size == 1
        num_targets = self.num_targets(step)
        found, loss = dict[str, Summed](), 0.0
        for number, batch in enumerate(self.batches(step)):
            self.low.micro_batch(number)
            part = batch_loss(self.model, batch, self.world)
            (part * (1 / num_targets)).backward()
            loss += part.item()
            for name, gradient in self.gradients().items():
                exact, magnitude = found.get(name, (0.0, 0.0))
                gradient = gradient.double()
                found[name] = Summed(exact + gradient, magnitude + gradient.abs())
            self.optimizer.zero_grad(set_to_none=True)
        mean = torch.tensor(loss / num_targets, dtype=torch.float64)
        return found | {"loss": Summed(mean, mean)}  # no term is negative

    def update(self) -> None:
        """Clipping and the optimizer's step."""
        clip_grad_norm(self.model, self.cfg.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def clip_grad_norm(model: torch.nn.Module, max_norm: float) -> Tensor:
    """Clips as `training.Update` does, without an update; the norm before, 0-dimensional."""
    squares = optimizer.grad_squares(model)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().to(torch.float32)
    optimizer.scale_gradients(model, max_norm, norm)
    return norm


class Summed(NamedTuple):
    """A sum over micro-batches, in float64."""

    exact: Tensor
    magnitude: Tensor
    """The same sum of absolute values."""

    def excess(self, actual: Tensor, rounding: float = 0.0) -> float:
        """How far `actual` is from the sum, over what summation in float32 can make of it; at most 1.

        rounding: what else each micro-batch's gradient may be off by, relative.

        Each micro-batch's own gradient has the same bits on any rank: the same operands, of which its place
        decides every scale and random bit, and a factor (ranks over targets) that differs by a power of two.
        A float32 sum of n terms in any order is off by at most (n - 1) u / (1 - (n - 1) u) times the sum of
        magnitudes, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
        """
        unit = (NUM_MICRO_BATCHES - 1) * 2.0**-24
        off, bound = (actual.double() - self.exact).abs(), self.magnitude * (unit / (1 - unit) + rounding)
        # Where all terms are zero the sum must be.
        return float(torch.where(off == 0, 0.0, off / bound).max())


batch_loss = load_main(catalog.recipes()["full_finetune"]).__globals__["batch_loss"]


def forward_backward(
    model: models.Decoder,
    batches: Sequence[data.Batch],
    num_targets: float,
    cfg: FinetuneConfig,
    world: distributed.World,
    low: linear.LowPrecision,
) -> Tensor:
    """The recipe's inner loop; this rank's summed loss."""
    loss_sum = torch.zeros((), device=world.device)
    for batch in distributed.accumulate(model, batches, world, cfg, low):
        loss = batch_loss(model, batch, world)
        (loss * (world.data_size / num_targets)).backward()
        loss_sum += loss.detach()
    return loss_sum
