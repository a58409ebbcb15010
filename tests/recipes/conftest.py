"""A tiny checkpoint and the ways to run a recipe on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]


def environment() -> dict[str, str]:
    """One thread per process, so that sums are taken in one order, and nothing of a launcher above us."""
    dropped = ("LPTUNE_", "TORCHELASTIC_", "PET_")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in ("RANK", "WORLD_SIZE")
    }
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama3_2/tiny with random weights and a tokenizer that knows a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    command = [sys.executable, "-m", "lptune.cli.main", "new-checkpoint", "llama3_2/tiny", str(folder)]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return folder


@pytest.fixture
def tiny_config(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A run of a few seconds: 12 steps of 8 short rows of the built-in data."""
    values = {
        "model": {"path": str(tiny_checkpoint)},
        "data": {"source": "builtin", "seq_len": 128, "eval_fraction": 0.05, "max_rows": 600},
        "optimizer": {"lr": 3.0e-3},
        "schedule": {"warmup_steps": 2},
        "compile": "none",
        "activation_checkpointing": "none",
        "compute_dtype": "float32",
        "device": "cpu",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_steps": 12,
        "eval_every_steps": 6,
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def run_recipe(tiny_config: Path, tmp_path: Path) -> Run:
    """`run_recipe("key=value", ranks=2)`: `lptune run full_finetune` as a subprocess; fails the test on
    another exit code.
    """

    def call(
        *overrides: str,
        ranks: int = 1,
        code: int = 0,
        config: Path = tiny_config,
        recipe: str = "full_finetune",
        **env: str,
    ) -> Finished:
        command = [sys.executable, "-m", "lptune.cli.main", "run"]
        command += [f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command += [recipe, "--config", str(config), *overrides]
        done = subprocess.run(
            command, env=environment() | env, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    """Training losses by step, at full precision."""
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]
