"""The export of a mean of checkpoints, against a mean that numpy computes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lptune.checkpoint import list_checkpoints
from lptune.checkpoint.sums import verify_sums
from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_checkpoint, write_config

KEYS = ("precision.kind=int8_rowcol", "num_steps=6", "optimizer.lr=1e-2", "eval_every_steps=0")
AVERAGED = ("checkpoint.every_steps=2", "checkpoint.keep_last=3", "export.average_checkpoints=3")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of random weights."""
    return make_checkpoint(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    """A tiny run into `run`."""
    return write_config(tmp_path / "tiny.yaml", base, tmp_path / "run")


def train(config: Path, *overrides: str, code: int = 0, ranks: int = 1) -> Finished:
    """`lptune run full_finetune`; fails on another exit code."""
    command = ["run", "full_finetune", "--config", str(config), *KEYS, *overrides]
    done = warm.lptune(command, folder=config.parent, ranks=ranks, timeout_s=300)
    assert done.returncode == code, done.stderr
    return done


def exported(folder: Path) -> dict[str, Any]:
    """The tensors of an export."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def means(run: Path, count: int) -> dict[str, Any]:
    """The float64 mean of the last `count` checkpoints of a run on one rank, rounded to float32."""
    files = [load_file(path / "model-00000.safetensors") for path in list_checkpoints(run / "checkpoints")]
    return {
        name: np.mean([file[name].astype(np.float64) for file in files[:count]], axis=0).astype(np.float32)
        for name in files[0]
    }


def test_the_mean_of_the_last_checkpoints_is_exported_by_the_run_and_by_the_command(config: Path) -> None:
    done = train(config, *AVERAGED)
    folder, run = config.parent, config.parent / "run"
    assert "compared with the mean of the last 3 checkpoints" in done.stdout
    ours, expected, last = exported(run / "export"), means(run, 3), means(run, 1)
    assert all(np.array_equal(ours[name], expected[name]) for name in ours)
    assert any(not np.array_equal(ours[name], last[name]) for name in ours), "the steps differ"
    card = (run / "export" / "README.md").read_text(encoding="utf-8")
    assert "| weights | mean of the checkpoints of steps 2, 4, 6 |" in card
    verify_sums(run / "export")

    # The command gives the run's own bytes, or another mean.
    for name, more, count in (("same", [], 3), ("two", ["--average=2"], 2), ("one", ["--average=1"], 1)):
        done = warm.lptune(["export", str(run), name, *more], folder=folder)
        assert done.returncode == 0, done.stderr
        found, wanted = exported(folder / name), means(run, count)
        assert all(np.array_equal(found[key], wanted[key]) for key in found)
    for file in (run / "export").iterdir():
        assert file.read_bytes() == (folder / "same" / file.name).read_bytes()
    assert "| weights |" not in (folder / "one" / "README.md").read_text(encoding="utf-8")

    assert "already finished" in train(config, *AVERAGED).stdout
    done = train(config, *AVERAGED[:2], "export.average_checkpoints=2", code=2)
    assert "exists already, with export.average_checkpoints 3 (now 2)" in done.stderr


def test_two_ranks_export_the_mean_that_one_process_exports(config: Path) -> None:
    train(config, "num_steps=4", "checkpoint.every_steps=2", "export.average_checkpoints=2", ranks=2)
    done = warm.lptune(["export", str(config.parent / "run"), "alone"], folder=config.parent)
    assert done.returncode == 0, done.stderr
    ours, alone = exported(config.parent / "run" / "export"), exported(config.parent / "alone")
    assert ours.keys() == alone.keys()
    assert all(np.array_equal(ours[name], alone[name]) for name in ours)


def test_an_average_that_cannot_be_had_is_one_line_and_leaves_nothing(config: Path) -> None:
    folder, run = config.parent, config.parent / "run"
    for overrides, message in (
        (("checkpoint.every_steps=2",), "3 checkpoints must be kept, found checkpoint.keep_last=2; set "),
        (("checkpoint.keep_last=3",), "only the last step is saved; set checkpoint.every_steps"),
        (("checkpoint.keep_last=3", "checkpoint.every_steps=3"), "with checkpoint.every_steps=3 saves 2; "),
    ):
        done = train(config, "export.average_checkpoints=3", *overrides, code=2)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not run.exists()

    train(config, "checkpoint.every_steps=3", "export.enabled=false")
    first, last = (run / "checkpoints" / f"step-0000000{step}" for step in (3, 6))

    def refused(checkpoint: Path, count: int) -> str:
        done = warm.lptune(["export", str(checkpoint), "new/out", f"--average={count}"], folder=folder)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert not (folder / "new").exists()
        return done.stderr

    assert "has 2 checkpoints up to step 6, and the export is to average 3; average fewer" in refused(run, 3)
    assert "has 1 checkpoint up to step 3" in refused(first, 2)
    weights = first / "model-00000.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert f"{weights}: its content does not match" in refused(last, 2)
    shutil.rmtree(first)
    train(config, "seed=1", "num_steps=3", "export.enabled=false", f"output_dir={folder / 'other'}")
    shutil.copytree(folder / "other" / "checkpoints" / first.name, first)
    assert f"{first}: is of another run than {last.name}" in refused(last, 2)
