"""Kinds x compilation x checkpointing x models: cells in which all pairs meet (all cells: `make matrix`)."""

import itertools

import pytest

from tests import matrix


@pytest.mark.parametrize("cell", matrix.pairwise(), ids=lambda cell: ",".join(cell))
def test_counts_graphs_bits_and_errors_hold(cell: matrix.Cell) -> None:
    outcome = matrix.run(cell, fused=True)
    assert not outcome.failures
    assert outcome.errors.keys() == {"output", "grad_input", "grad_weight"}


def test_every_pair_of_values_meets_in_a_cell() -> None:
    chosen = matrix.pairwise()
    factors = matrix.FACTORS | {"compile": ("none", "block", "model")}
    for (i, first), (j, second) in itertools.combinations(enumerate(factors.values()), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == set(itertools.product(first, second))
