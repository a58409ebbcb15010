"""The example of a model and loop of one's own, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.conftest import environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def _run(num_ranks: int, kind: str, tensor: int) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, f"--nproc-per-node={num_ranks}", str(EXAMPLE), kind, str(tensor)]
    done = subprocess.run(
        command,
        env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("num_ranks", "kind", "tensor"), [(2, "float8_tensorwise", 2), (4, "int8_rowcol", 2)]
)
def test_it_trains_verified_on_any_mesh(num_ranks: int, kind: str, tensor: int) -> None:
    lines = _run(num_ranks, kind, tensor).splitlines()
    (verified,) = [line for line in lines if line.startswith("verified:")]
    # Two blocks of four layers, and the head: three GEMMs each.
    assert "27 8-bit GEMMs ran in the first step" in verified
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < 0.2 * losses[0]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100
