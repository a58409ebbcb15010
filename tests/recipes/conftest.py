"""A tiny checkpoint and the ways to run a recipe on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
def run_recipe(tiny_config: Path) -> Run:
    """`run_recipe("key=value", ranks=2)`: `lptune run full_finetune` with tiny_config (`runner`)."""
    return runner("full_finetune", tiny_config)


def runner(recipe: str, config: Path) -> Run:
    """`runner(recipe, config)("key=value", ranks=2)`: `lptune run` in warm processes, in the config's
    folder; fails the test on another exit code. On a GPU `is_cold` starts one as a user does: what has met
    CUDA cannot be forked.
    """
    usual_recipe, usual_config, folder = recipe, config, config.parent

    def call(
        *overrides: str,
        ranks: int = 1,
        code: int = 0,
        config: Path = usual_config,
        recipe: str = usual_recipe,
        is_cold: bool = False,
        **env: str,
    ) -> Finished:
        arguments = [recipe, "--config", str(config), *overrides]
        if is_cold:
            arguments.insert(0, f"--nproc-per-node={ranks}")
            done = cold.run(*cold.LPTUNE, "run", *arguments, folder=folder, **env)
        else:
            done = warm.lptune(
                ["run", *arguments], folder=folder, environment=env, ranks=ranks, timeout_s=300
            )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


def refusal(done: Finished) -> str:
    """The one line of a command that wrong input has ended."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def read_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return read_lines(folder / "metrics.jsonl")


def losses(folder: Path) -> list[float]:
    """Training losses by step, at full precision."""
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The records of a run that have a held-out loss."""
    return [record for record in read_metrics(folder) if "eval_loss" in record]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder, such as an export."""
    return load_file(folder / "model.safetensors")


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that are not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return {name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)}
