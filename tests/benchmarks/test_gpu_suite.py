"""The GPU suite in its small form, so that the one command works when there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kernels", "linear", "crossover", "fsdp", "1b"])
def test_a_part_runs_on_a_cpu_and_leaves_its_figures(part: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--part", part, "--small", "--out", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit 0" in done.stdout
    assert (tmp_path / f"{part}.txt").read_text()
    if part == "crossover":
        assert "int8_rowcol" in done.stdout  # a trial writes no figures
        return
    rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
    assert rows
    assert not [row for row in rows if "failed" in row]
