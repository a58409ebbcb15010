"""Kinds x compilation x checkpointing x models: cells in which all pairs meet (all cells: `make matrix`)."""

import itertools
from typing import Any

import pytest

from tests.proofs import matrix


def _marked(cell: matrix.Cell) -> Any:
    """Slow: compiled cells, 5 to 25 s each. Layers of every kind are compiled in linear/test_devices.py,
    blocks in recipes/test_full_finetune.py, a history that the graph writes in distributed/test_gather.py, a
    whole model in distributed/test_parallelize.py.
    """
    is_slow = cell.compile != "none"
    return pytest.param(cell, id=",".join(cell), marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("cell", [_marked(cell) for cell in matrix.pairwise()])
def test_counts_graphs_bits_and_errors_hold(cell: matrix.Cell) -> None:
    outcome = matrix.run(cell, fused=True)
    assert not outcome.failures
    assert outcome.errors.keys() == {"output", "grad_input", "grad_weight"}


def test_every_pair_of_values_meets_in_a_cell() -> None:
    chosen = matrix.pairwise()
    factors = matrix.FACTORS | {"compile": ("none", "block", "model")}
    for (i, first), (j, second) in itertools.combinations(enumerate(factors.values()), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == set(itertools.product(first, second))
