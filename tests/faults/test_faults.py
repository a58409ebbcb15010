"""Short forms of the scripts in this folder; `make faults` runs the long ones."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.corruption import corruption
from tests.faults.io_errors import compile_shim, io_errors
from tests.faults.resume import exact
from tests.faults.run_folder_errors import run_folder_errors
from tests.faults.runs import PRECISIONS, Inputs, outcome, prepare, run_part, uninterrupted
from tests.helpers import cold, warm
from tests.helpers.cold import Finished


@pytest.mark.parametrize(("ranks", "trials"), [(1, 8), (2, 3)])
def test_a_kill_while_saving_loses_nothing_that_was_published(ranks: int, trials: int) -> None:
    # In a process of its own: it forks, which one with threads had better not do.
    done = cold.run("-m", "tests.faults.kills", f"--ranks={ranks}", f"--trials={trials}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{trials} kills" in done.stdout


def test_a_failing_disk_is_named_and_leaves_every_published_checkpoint_intact(tmp_path: Path) -> None:
    if compile_shim(tmp_path) is None:
        pytest.skip("needs Linux and a C compiler (gcc or cc)")
    counts, wrong = io_errors(1, 6, ["ENOSPC", "EIO", "short write"], tmp_path)
    assert wrong == []
    failed = {fault.partition(":")[0] for fault in counts}
    assert {"write", "fsync", "rename", "open"} <= failed


@pytest.mark.slow  # `make faults` runs it, too
def test_a_disk_that_fails_elsewhere_in_a_runs_folder_is_one_line(tmp_path: Path) -> None:
    if compile_shim(tmp_path) is None:
        pytest.skip("needs Linux and a C compiler (gcc or cc)")
    done = run_folder_errors(60, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 went wrong" in done.stdout


def test_every_change_of_any_file_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    counts, wrong = corruption(1, 0, tmp_path)
    assert wrong == []
    assert sum(counts.values()) > 300


def _warm(arguments: list[str], ranks: int, folder: Path, extra: dict[str, str]) -> Finished:
    """The same command line where torch is imported already; several ranks as under plain torchrun."""
    return warm.lptune(["run", *arguments], folder=folder, environment=extra, ranks=ranks, timeout_s=120)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Inputs]:
    """Of a recipe."""
    return lambda name: prepare(tmp_path_factory.mktemp(name), _warm, name)


def test_a_run_resumed_thrice_is_bitwise_the_one_that_was_not(inputs: Callable[[str], Inputs]) -> None:
    precision = "int8_rowcol, rounded stochastically"
    _, wrong = exact(inputs("full_finetune"), precision, 1, stops=(4, 5, 7))
    assert wrong == []


def test_a_run_killed_twice_is_bitwise_the_one_that_was_not(inputs: Callable[[str], Inputs]) -> None:
    # The other recipes: their own tests, and `make faults`.
    recipe = inputs("distill")
    precision = PRECISIONS["int8_rowcol, rounded stochastically"]
    expected = outcome(uninterrupted(recipe, "whole", 1, *precision))
    killed = recipe.folder / "killed"
    for step in (5, 10):
        wrong = run_part(recipe, killed, 1, *precision, stop_after=step, by=signal.SIGKILL)
        assert wrong is None
    assert run_part(recipe, killed, 1, *precision) is None
    assert outcome(killed).differences(expected) == []
