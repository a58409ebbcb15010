"""1 rank x 4 accumulation steps, 2 x 2 and 4 x 1 train alike; equivalence.py says how alike, why."""

from unittest import mock

import pytest

from lptune import linear
from tests.helpers import tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but
from tests.proofs import equivalence

CASES = ("none", "int8_rowcol", "float8_delayed", "int8_rowcol, rounded stochastically")
"""No low precision, scales of each step, a history, and random bits. `make proofs` has all kinds (`python -m
tests.proofs.equivalence`). What a kind does on ranks of its own has a cell in test_rank_matrix.py.
"""


# The last is int8_rowcol, too. `none`: recipes/test_full_finetune.py.
@pytest.mark.parametrize("case", slow_but(lambda case: case == "int8_rowcol", CASES))
def test_ranks_and_accumulation_steps_are_interchangeable(case: str, ranks: Ranks) -> None:
    # The first step is what is held closest; by the fourth, scales and histories of earlier ones are in use.
    for difference in equivalence.compare(ranks, case, seed=0, num_steps=4):
        assert difference.first_excess <= 1  # loss and gradients: derived
        assert difference.first_loss <= 2 * 3 * 2**-24  # two sums of four terms, none negative
        # Measured over 5 seeds: 1.1e-7 for `none`, at most 2.1e-4 for the others (docs/log.md).
        assert difference.largest <= (1e-6 if case == "none" else 1e-3)


def _numbered_within_its_rank(rank: int, num_ranks: int, case: str) -> equivalence.Trained:
    start = linear.StochasticRounding.start

    def local(rounding: linear.StochasticRounding, step: int, micro_batch: int) -> None:
        # What the first rank has, for itself and for comparison, is numbered rightly.
        share = tiny_run.NUM_MICRO_BATCHES // num_ranks
        start(rounding, step, micro_batch % share if rank else micro_batch)

    with mock.patch.object(linear.StochasticRounding, "start", local):
        return equivalence.train(rank, num_ranks, equivalence.CASES[case], 0)


def test_random_bits_that_do_not_go_by_the_place_in_the_global_batch_are_noticed(ranks: Ranks) -> None:
    case = "int8_rowcol, rounded stochastically"
    trained: equivalence.Trained = ranks.run(_numbered_within_its_rank, 2, case)[0]
    assert max(trained.excess.values()) > 100
