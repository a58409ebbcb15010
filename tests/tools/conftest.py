"""The fixtures of the command line, and folders of runs as files alone: a report reads nothing else."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import command, lptune
from tests.helpers import cold

__all__ = ["command", "lptune"]

CONFIG = """model: {path: checkpoints/quickstart}
data: {source: builtin}
precision: {kind: int8_rowcol, emulate: false}
optimizer: {lr: 0.003}
export: {enabled: true}
num_steps: %d
output_dir: runs/x
"""
MakeRun = Callable[..., Path]


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row as a run writes it."""
    return {
        "step": step, "loss": 2.0 + math.exp(-step / 20), "num_tokens": step * 2048, "lr": 1e-3,
        "grad_norm": 1.0 + 1 / step, "num_skipped": 0, "tokens_per_s": 20_000.0, "step_time_s": 0.1,
        "compile_time_s": 0.0, "peak_memory_gib": 0.5, "low_precision_flops_fraction": 0.75, "mfu": None,
        "time": f"2026-11-23T10:{step // 60 % 60:02d}:{step % 60:02d}.000+00:00", **more,
    }  # fmt: skip


def wait_for(
    condition: Callable[[], object], process: cold.Process | None = None, timeout_s: float = 120
) -> None:
    """Until the condition holds, while `process` lives."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("a", rows)` writes a run's folder. rows: dicts, or text that is written as it is."""

    def make(name: str, rows: list[dict[str, Any]] | str | bytes, **files: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if isinstance(rows, list):
            rows = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / "metrics.jsonl").write_bytes(rows.encode() if isinstance(rows, str) else rows)
        (folder / "config.yaml").write_text(CONFIG % 100, encoding="utf-8")
        for key, content in files.items():
            path = folder / key.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return folder

    return make


def plan(num_blocks: int = 2, **cells: str) -> dict[str, Any]:
    """precision_plan.json of a decoder."""
    low = {"output": "int8 row", "grad_input": "int8 folded", "grad_weight": "int8 column",
           "all_gather": "int8 rows"} | cells  # fmt: skip
    layers = [
        {
            "name": f"model.layers.{block}.{part}",
            "shape": [128, 64],
            **low,
            "spec": {"kind": "x"},
            "reason": None,
        }
        for block in range(num_blocks)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    high = dict.fromkeys(low, "high")
    head = {"name": "lm_head", "shape": [1024, 64], **high, "spec": None, "reason": "in precision.skip"}
    return {"kind": "int8_rowcol", "num_converted": len(layers), "frozen": [], "layers": [*layers, head]}
