"""The example of a model and loop of one's own: as a user starts it, and on a mesh of two axes."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import cold
from tests.helpers.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def _launched(num_ranks: int, kind: str, tensor: int) -> str:
    arguments = (f"--nproc-per-node={num_ranks}", str(EXAMPLE), kind, str(tensor))
    done = cold.run(*cold.TORCHRUN, *arguments, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _eager(rank: int, num_ranks: int, kind: str, tensor: int) -> str:
    torch.compiler.set_stance("force_eager")
    sys.argv = [str(EXAMPLE), kind, str(tensor)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


@pytest.mark.slow
def test_a_launcher_starts_it_compiled_and_it_trains_verified() -> None:
    _check(_launched(2, "int8_rowcol", 2))


# On a mesh of two axes: distributed/test_stock_styles.py.
@pytest.mark.parametrize(("num_ranks", "tensor"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_it_trains_verified_where_scales_and_weights_cross_ranks(num_ranks: int, tensor: int) -> None:
    # Eager: FSDP's collectives are outside the graph that the launched run compiles.
    _check(run_ranks(num_ranks, _eager, "float8_tensorwise", tensor)[0])


def _check(output: str) -> None:
    lines = output.splitlines()
    (verified,) = [line for line in lines if line.startswith("verified:")]
    # Two blocks of four layers, and the head: three GEMMs each.
    assert "27 8-bit GEMMs ran in the first step" in verified
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < 0.2 * losses[0]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100
