"""A tiny checkpoint and the ways to run a recipe on it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm
from tests.helpers.tiny_recipe import environment, make_checkpoint, write_config

Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama3_2/tiny with random weights and a tokenizer that knows a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def tiny_config(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A run of a few seconds: 12 steps of 8 short rows of the built-in data."""
    return write_config(tmp_path / "tiny.yaml", tiny_checkpoint, tmp_path / "run")


@pytest.fixture
def run_recipe(tiny_config: Path, tmp_path: Path) -> Run:
    """`run_recipe("key=value", ranks=2)`: `lptune run full_finetune` in processes of its own; fails the test
    on another exit code. They are forked off one that has imported torch, for the import is most of such a
    run; with variables of the environment, some of which torch reads at import, they start as a user's do.
    """

    def call(
        *overrides: str,
        ranks: int = 1,
        code: int = 0,
        config: Path = tiny_config,
        recipe: str = "full_finetune",
        **env: str,
    ) -> Finished:
        arguments = [recipe, "--config", str(config), *overrides]
        if not env:
            done = warm.lptune(["run", *arguments], folder=tmp_path, ranks=ranks, timeout_s=300)
        else:
            command = [sys.executable, "-m", "lptune", "run", f"--nproc-per-node={ranks}", *arguments]
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
