"""Kinds x features x ranks: some of the cells (all: `make matrix`), and that they can fail."""

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lptune.distributed import World
from lptune.kernels import Packed, unpack_rows
from lptune.linear.weights.master_weight import MasterWeight
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_run import TinyRun
from tests.proofs import rank_cell, rank_matrix
from tests.proofs.rank_cell import Cell, Outcome


# Every feature once; kinds with the rows' own scales, with a history, and with amaxes that ranks agree on; on
# four ranks, replicas of shards. Without low precision: recipes/test_full_finetune.py. The gradients of other
# kinds on a mesh of 2 x 2: distributed/test_tensor_parallel.py. Compiled: distributed/test_collectives.py.
@pytest.mark.parametrize(
    "cell",
    [
        Cell("int8_rowcol", "tied head", 2),
        Cell("int8_rowcol", "frozen layer", 2),
        Cell("float8_delayed", "uneven rows", 2),
        Cell("float8_delayed", "full AC", 2),
        Cell("float8_blockwise", "HSDP", 4),
    ],
    ids=str,
)
def test_one_ranks_gradients_counts_gathers_and_weights(cell: Cell, ranks: Ranks) -> None:
    outcome = rank_matrix.run(cell, ranks)
    assert not outcome.failures
    assert outcome.num_gemms > 0


def _with_a_stale_scale(rank: int, num_ranks: int, cell: Cell) -> Outcome:
    """A weight sends its new values with the scales of the first step."""
    first: dict[int, torch.Tensor] = {}
    quantize = MasterWeight.rows_to_send

    def with_first_scale(weight: MasterWeight, mesh: DeviceMesh, num_rows: int) -> Packed:
        sent = quantize(weight, mesh, num_rows)
        scale = unpack_rows(sent.buffer, num_rows, torch.int8).scale
        scale.copy_(first.setdefault(weight.number, scale.clone()))
        return sent

    with mock.patch.object(MasterWeight, "rows_to_send", with_first_scale):
        return rank_cell.run_rank(rank, num_ranks, cell)


def _with_its_own_amaxes(rank: int, num_ranks: int, cell: Cell) -> Outcome:
    with mock.patch.object(World, "max_"):
        return rank_cell.run_rank(rank, num_ranks, cell)


def _with_its_own_mean(rank: int, num_ranks: int, cell: Cell) -> Outcome:
    """A loss divided by the targets of this rank, as often as there are ranks, instead of all targets."""

    def own(run: TinyRun, step: int) -> int:
        return run.world.data_size * sum(batch.num_targets for batch in run.batches(step))

    with mock.patch.object(TinyRun, "num_targets", own):
        return rank_cell.run_rank(rank, num_ranks, cell)


@pytest.mark.parametrize(
    ("faulty", "cell", "claim"),
    [
        (_with_a_stale_scale, Cell("int8_rowcol", "frozen layer", 2), "step 2: .* times what is allowed"),
        (
            _with_its_own_amaxes,
            Cell("float8_delayed", "tied head", 2),
            "step 1: amax_history/.*: other amaxes",
        ),
        (_with_its_own_mean, Cell("none", "HSDP", 2), "step 1: .* times what is allowed"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_planted_fault_is_found(
    faulty: Callable[..., Outcome], cell: Cell, claim: str, ranks: Ranks
) -> None:
    outcomes: list[Outcome] = ranks.run(faulty, cell.ranks, cell)
    assert any(re.match(claim, failure) for outcome in outcomes for failure in outcome.failures)
