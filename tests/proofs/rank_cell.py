"""One cell of the matrix of ranks: a kind and a feature on some number of ranks.

A cell trains a tiny decoder for two steps of four micro-batches through the recipe's own `forward_backward`,
in bfloat16 over float32 master weights, dealt out over its ranks. Beside it one rank has the same model to
itself (its own mesh of one; gathers in high precision unless compiled) and computes the micro-batches one by
one. The cell holds if

- gradients: loss and all gradients of both steps are those of the one rank, to what summing four
  micro-batches in another order may change (`tiny_run.Summed`). The second step starts from the weights
  that the ranks' optimizers made, so a scale that outlives its weight shows, as do rows that were gathered
  to a wrong place;
- counts: `linear.verify_step` finds the planned 8-bit GEMMs in both steps, and 8-bit gathers of the planned
  bytes for all weights that are to be gathered so;
- collectives: what FSDP gathered in a step is, to the byte, what is planned for two gathers of each block
  and one of the root for each micro-batch; gradients are reduced once, in float32;
- resharding: with `reshard_after_forward` false both steps give the same bits as with true;
- amaxes: the histories of `float8_delayed` are, to the bit, those of the one rank;
- weights: after each update all are finite, every trained one has changed and no frozen one has; ranks that
  hold the same part of one hold the same bits;
- graphs: compiled, all blocks and passes share one, the head and the loss have another, and nothing is
  compiled later.

On 8 ranks the mesh has three axes: 2 replicas, 2 shards, 2 ranks of tensor parallelism. The last share each
matrix, and have scales of their own for their parts of it and of its operands. The kind's noise is drawn
anew, and gradients (here in float32 compute) are held to what that noise is: none may be farther from one
rank's than twice as far as that is from the gradient without low precision. Two independent draws would be
sqrt(2) times as far. Nothing is allowed beside it but float32 sums in another order, 1e-5 of a gradient's
norm (measured: 5e-7); the loss may differ by 1e-3.

Rows of a converted weight are a multiple of 16 and divide by 2, 4 and 8. What is uneven is a vocabulary of
131, and the 144 rows of the MLP, which no block of 128 divides. Converted weights of uneven rows, which need
3 ranks, are in tests/distributed/test_gather.py.
"""

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from lptune import distributed, linear, models
from lptune.config import FinetuneConfig, ParallelConfig, PrecisionConfig
from tests.helpers import tiny_run
from tests.helpers.tiny_run import Summed, TinyRun

ALL = "all six"
FEATURES = ("uneven rows", "tied head", "HSDP", "full AC", "compile", "frozen layer")
FEATURES_3D = ("sequence parallel", "whole sequences", ALL)
RANKS_3D = 8
# Of an HSDP cell. One rank can replicate nothing: there it is a cell like any other.
_REPLICATE = {1: 1, 2: 2, 4: 2, RANKS_3D: 2}
_FLOAT32_SUMS = 1e-5
# torch 2.15 casts each gradient of a micro-batch that is accumulated to float32 before autograd adds those of
# an embedding and its tied head, and adds them in bfloat16 where a micro-batch is alone.
_TIED_SUM = 2.0**-8 if hasattr(FSDPParam, "unsharded_grad_dtype") else 0.0
NUM_STEPS = 2


class Cell(NamedTuple):
    """One combination of values, one of each factor."""

    kind: str
    feature: str
    ranks: int

    def has(self, feature: str) -> bool:
        """Whether it is in the cell, alone or with the others."""
        return self.feature in (feature, ALL)

    @property
    def is_3d(self) -> bool:
        """Whether its mesh has an axis for tensor parallelism."""
        return self.ranks == RANKS_3D

    def __str__(self) -> str:
        return f"{self.kind}, {self.feature}, {self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass
class Outcome:
    """What a cell found. No failures: it holds."""

    failures: list[str] = field(default_factory=list)
    num_gemms: int = 0
    """Of the first step, one rank's."""
    num_low_gathers: int = 0
    excess: float = 0.0
    """Largest difference to one rank's gradients, as a share of what is allowed."""
    seconds: float = 0.0
    parts: dict[str, str] = field(default_factory=dict)
    """Name and place of this rank's part of a weight -> a hash of its bits."""

    def check(self, holds: bool, claim: str) -> None:
        if not holds:
            self.failures.append(claim)


def run_rank(rank: int, num_ranks: int, cell: Cell) -> Outcome:
    """One rank's part of the cell, a job for `Ranks`; the first compares with the one rank."""
    warnings.simplefilter("error" if not cell.has("compile") else "ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outcome, cfg = Outcome(), _config(cell)
    with distributed.session("cpu", cfg.parallel) as world:
        one_rank = tiny_run.alone_beside(world)
        ranks_run = _start(cell, cfg, world)
        references: list[TinyRun] = []
        if rank == 0:
            references.append(_start(cell, _alone(cfg), one_rank))
            if cell.is_3d:
                plain = dataclasses.replace(cfg, precision=PrecisionConfig(kind="none"))
                references.append(_start(cell, _alone(plain), one_rank))
        for step in range(NUM_STEPS):
            _step(cell, step, ranks_run, references, outcome)
        outcome.parts = dict(_hashes(ranks_run.model))
    return outcome


def _config(cell: Cell) -> FinetuneConfig:
    replicate = _REPLICATE[cell.ranks] if cell.has("HSDP") else 1
    # So that FSDP shards on one rank, too.
    parallel = ParallelConfig(replicate=replicate, reshard_after_forward=True)
    if cell.is_3d:
        sequence = cell.feature != "whole sequences"
        parallel = ParallelConfig(replicate=2, tensor=2, sequence=sequence)
    return tiny_run.config(
        cell.kind,
        compute_dtype="float32" if cell.is_3d else "bfloat16",
        compile="block" if cell.has("compile") else "none",
        activation_checkpointing="full" if cell.has("full AC") else "none",
        parallel=parallel,
    )


def _alone(cfg: FinetuneConfig) -> FinetuneConfig:
    """The same on one rank, and in high precision where that cannot change a bit."""
    precision = cfg.precision
    if cfg.compile == "none" and precision.gathers_low:
        precision = dataclasses.replace(precision, all_gather="high")
    return dataclasses.replace(cfg, precision=precision, parallel=ParallelConfig())


def _start(cell: Cell, cfg: FinetuneConfig, world: distributed.World) -> TinyRun:
    content: dict[str, Any] = {"tie_word_embeddings": cell.has("tied head")}
    if cell.has("uneven rows"):
        # Halves that tensor parallelism makes are multiples of 16, too.
        content |= {"vocab_size": 131, "intermediate_size": 192 if cell.is_3d else 144}
    freeze = _freeze if cell.has("frozen layer") else None
    return TinyRun(cfg, world, tiny_run.decoder_config(**content), freeze=freeze)


def _freeze(model: models.Decoder) -> None:
    for block in model.model.layers:  # in every block: another set of trained weights is another graph
        block.mlp.down_proj.weight.requires_grad_(False)  # type: ignore[union-attr, operator]


def _step(cell: Cell, step: int, run: TinyRun, references: Sequence[TinyRun], outcome: Outcome) -> None:
    before = run.values()
    with run.low.step(step, num_passes=1):
        loss, found = _both_ways(cell, step, run, outcome)
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    outcome.check(found.keys() == trained, f"step {step + 1}: gradients of others than the trained weights")
    expected = []
    for reference in references:
        reference.fill(before)
        with reference.low.step(step, num_passes=1):
            expected.append(reference.summed_gradients(step))
    for name, actual in (
        {**found, "loss": torch.tensor(loss, dtype=torch.float64)}.items() if expected else ()
    ):
        rounding = _TIED_SUM if cell.has("tied head") and name == "model.embed_tokens.weight" else 0.0
        excess = _excess(name, actual, [sums[name] for sums in expected], rounding)
        outcome.check(excess <= 1, f"step {step + 1}: {name} is off by {excess:.2f} times what is allowed")
        outcome.excess = max(outcome.excess, excess)
    for name, history in run.low.state().items() if references and not cell.is_3d else ():
        same = torch.equal(history, references[0].low.state()[name])
        outcome.check(same, f"step {step + 1}: {name}: other amaxes")
    run.update()
    for name, value in run.values().items():
        dense, old = _dense(value), _dense(before[name])
        outcome.check(bool(dense.isfinite().all()), f"{name} is not finite after step {step + 1}")
        changed = not torch.equal(dense, old)
        outcome.check(changed == (name in trained), f"{name}: changed is {changed} after step {step + 1}")


def _excess(name: str, actual: Tensor, expected: Sequence[Summed], rounding: float) -> float:
    """Distance of a gradient or the loss from one rank's, as a share of what is allowed."""
    if len(expected) == 1:
        return expected[0].excess(actual, rounding)
    alone, plain = (each.exact for each in expected)
    if name == "loss":  # one number of noise may be small by chance
        return float((actual - alone).abs() / (1e-3 * alone))
    allowed = 2 * (alone - plain).norm() + _FLOAT32_SUMS * plain.norm()
    return float((actual - alone).norm() / allowed)


def _hashes(model: models.Decoder) -> Iterator[tuple[str, str]]:
    """This rank's parts of all weights: what and where they are, and a hash of their bits."""
    for name, parameter in model.named_parameters():
        weight = linear.plain_rows(parameter)
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        cut = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
        place = ", ".join(str(mesh.get_local_rank(axis)) for axis in cut)
        local = _dense(weight.to_local().detach()).contiguous().view(torch.uint8)
        yield f"{name} [{place}]", hashlib.sha256(local.numpy().tobytes()).hexdigest()


def _both_ways(cell: Cell, step: int, run: TinyRun, outcome: Outcome) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients, after the same has been seen without resharding."""
    graphs_before = _num_graphs()
    with distributed.record_collectives(run.world.mesh) as collectives:
        loss, verified = run.verified_step(step)
    mine, whole = _local_gradients(run), run.gradients()
    run.optimizer.zero_grad(set_to_none=True)
    num_graphs = _num_graphs() - graphs_before
    planned_graphs = 2 * (cell.has("compile") and step == 0)
    outcome.check(num_graphs == planned_graphs, f"step {step + 1}: {num_graphs} graphs")
    planned = sum(bool(layer.spec and layer.spec.gathers_low) for layer in run.plan.layers)
    gathered = verified.num_low_gathers
    outcome.check(gathered == planned, f"step {step + 1}: {gathered} of {planned} weights gathered in 8 bits")
    if step == 0:
        outcome.num_gemms, outcome.num_low_gathers = verified.num_gemms, gathered

    _check_collectives(step, run, collectives, outcome)

    _reshard_after_forward(run.model, False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        same = run.forward_backward(step) == loss
    outcome.check(same, f"step {step + 1}: another loss without resharding")
    for name, gradient in _local_gradients(run).items():
        same = torch.equal(gradient, mine[name])
        outcome.check(same, f"step {step + 1}: other bits without resharding: {name}")
    _reshard_after_forward(run.model, True)
    return loss, whole


def _check_collectives(
    step: int, run: TinyRun, collectives: distributed.Collectives, outcome: Outcome
) -> None:
    sizes = {axis: run.world.mesh[axis].size() for axis in run.world.mesh.mesh_dim_names or ()}
    distributed.reshard(run.model)
    planned = linear.planned_gathers(run.model, getattr(torch, run.cfg.compute_dtype))
    passes = len(run.batches(step)) if sizes["fsdp"] > 1 else 0  # FSDP asks nothing of a single rank
    # The root is not resharded after forward.
    expected = passes * sum(size * (2 if name else 1) for name, (size, _) in planned.items())
    gathered = collectives.num_bytes(operation="all_gather", axis="fsdp")
    outcome.check(gathered == expected, f"step {step + 1}: gathered {gathered} bytes, planned {expected}")
    for axis, operation in (("fsdp", "reduce_scatter"), ("replicate", "all_reduce")):
        expected = len(planned) if sizes.get(axis, 1) > 1 else 0
        # The loss is summed in float64.
        calls = collectives.num_calls(operation=operation, axis=axis, dtype="float32")
        outcome.check(calls == expected, f"step {step + 1}: {calls} x {operation}, not {expected}")


def _num_graphs() -> int:
    """Compiled by this process for this cell, the reference's included."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _local_gradients(run: TinyRun) -> dict[str, Tensor]:
    parameters = run.model.named_parameters()
    return {name: p.grad.to_local().clone() for name, p in parameters if isinstance(p.grad, DTensor)}


def _dense(value: Tensor) -> Tensor:
    return linear.dequantized(value) if linear.int8_rows(value) is not None else value


def _reshard_after_forward(model: models.Decoder, enabled: bool) -> None:
    for block in model.model.layers:
        assert isinstance(block, FSDPModule)
        block.set_reshard_after_forward(enabled)
