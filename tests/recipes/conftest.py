"""A tiny checkpoint and the ways to run a recipe on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cold, warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_checkpoint, write_config

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
    """`run_recipe("key=value", ranks=2)`: `lptune run full_finetune` in warm processes; fails the test on
    another exit code. On a GPU `is_cold` starts one as a user does: what has met CUDA cannot be forked.
    """

    def call(
        *overrides: str,
        ranks: int = 1,
        code: int = 0,
        config: Path = tiny_config,
        recipe: str = "full_finetune",
        is_cold: bool = False,
        **env: str,
    ) -> Finished:
        arguments = [recipe, "--config", str(config), *overrides]
        if is_cold:
            arguments.insert(0, f"--nproc-per-node={ranks}")
            done = cold.run(*cold.LPTUNE, "run", *arguments, folder=tmp_path, **env)
        else:
            done = warm.lptune(
                ["run", *arguments], folder=tmp_path, environment=env, ranks=ranks, timeout_s=300
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


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The records of a run that have a held-out loss."""
    return [record for record in read_metrics(folder) if "eval_loss" in record]


def runner(recipe: str, config: Path) -> Run:
    """As `run_recipe`, for another recipe and config; for fixtures that serve a module."""

    def call(*overrides: str, ranks: int = 1, code: int = 0) -> Finished:
        arguments = ["run", recipe, "--config", str(config), *overrides]
        done = warm.lptune(arguments, folder=config.parent, ranks=ranks, timeout_s=300)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call
