"""Kinds x compilation x checkpointing x models: a cell of each family of kinds (all cells: `make matrix`)."""

import pytest

from tests.proofs import matrix
from tests.proofs.matrix import Cell


# A compiled cell takes 5 to 25 s. In the suite layers of every kind are compiled in linear/test_devices.py,
# blocks in recipes/test_full_finetune.py, a history that the graph writes in distributed/test_gather.py, a
# whole model in distributed/test_parallelize.py.
@pytest.mark.parametrize(
    "cell",
    [
        Cell("int8_rotated", "none", "selective", "bias"),
        Cell("int8_tensorwise", "none", "full", "frozen layer"),
        Cell("float8_delayed", "none", "none", "tied head"),
        Cell("float8_blockwise", "none", "full", "bias"),
        Cell("nvfp4", "none", "none", "tied head"),
        Cell("int4_weight", "none", "selective", "frozen layer"),
        Cell("bitnet", "none", "none", "tied head"),
    ],
    ids=",".join,
)
def test_counts_graphs_bits_and_errors_hold(cell: Cell) -> None:
    outcome = matrix.run(cell, fused=True)
    assert not outcome.failures
    assert outcome.errors.keys() == {"output", "grad_input", "grad_weight"}
