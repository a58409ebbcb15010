"""Short forms of the scripts in this folder; `make faults` runs the long ones."""

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from tests.faults.hostile import FILES
from tests.faults.io_errors import compile_shim, io_errors
from tests.faults.preemption import Case, Run
from tests.faults.resume import exact
from tests.faults.run_folder_errors import run_folder_errors
from tests.faults.runs import prepare
from tests.faults.state import State
from tests.helpers import cold, warm
from tests.helpers.cold import Finished
from tests.helpers.ranks import Ranks


# Which files are there when: checkpoint/test_save.py. A run that is killed: below.
@pytest.mark.slow  # 8 s; `make faults` kills a thousand times
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


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def _link(file: Path, other: Path) -> None:
    other.unlink()
    file.rename(other)
    file.symlink_to(other)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda file, _: file.unlink(),
    "emptied": lambda file, _: os.truncate(file, 0),
    "cut": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "longer by a NUL": lambda file, _: file.write_bytes(file.read_bytes() + b"\0"),
    "with another byte": lambda file, _: _flip(file, file.stat().st_size // 2),
    "with another last byte": lambda file, _: _flip(file, -1),
    "that of another step": lambda file, other: shutil.copyfile(other, file),
    "a link": _link,
}
"""What is done to a file of the newest checkpoint; other: the same file of the oldest."""
OF_FOLDERS: dict[str, Callable[[Path], object]] = {
    "renamed": lambda folder: (folder / "step-00000003").rename(folder / "step-00000004"),
    "emptied": lambda folder: [path.unlink() for path in (folder / "step-00000003").iterdir()],
    "with a file too many": lambda folder: (folder / "step-00000003/model-00009.safetensors").touch(),
    "that of another step": lambda folder: (
        shutil.rmtree(folder / "step-00000003"),
        shutil.copytree(folder / "step-00000001", folder / "step-00000003"),
    ),
}
"""What is done to the folder of the newest checkpoint, from that of all."""


def _write_checkpoints(rank: int, num_ranks: int, folder: str) -> None:
    with distributed.session("cpu") as world:
        state = State(world)
        with state.writer(Path(folder), world, keep_last=9) as writer:
            for _ in range(3):
                state.advance()
                state.save(writer, wait=True)


def test_every_change_of_any_file_of_a_checkpoint_is_noticed_and_the_one_before_is_taken(
    ranks: Ranks, tmp_path: Path
) -> None:
    good, folder = tmp_path / "good", tmp_path / "checkpoints"
    ranks.run(_write_checkpoints, 2, str(good))
    names = sorted(path.name for path in (good / "step-00000003").iterdir())
    assert len(names) == 7
    damages = [*itertools.product(names, DAMAGES), *(("", what) for what in OF_FOLDERS)]
    with distributed.session("cpu") as world:
        for name, what in damages:
            shutil.copytree(good, folder, copy_function=shutil.copyfile)
            if name:
                DAMAGES[what](folder / "step-00000003" / name, folder / "step-00000001" / name)
            else:
                OF_FOLDERS[what](folder)
            before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
            newest = max(folder.glob("step-*"))
            with pytest.raises(UserError):
                checkpoint.find_checkpoint(folder, str(newest), world, print)
            warnings: list[str] = []
            found = checkpoint.find_checkpoint(folder, "auto", world, warnings.append)
            assert found is not None, (name, what)
            assert found.step == 2, (name, what)
            assert newest.name in warnings[0], (name, what)
            State().load(found)
            assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before, (name, what)
            shutil.rmtree(folder)


def _warm(arguments: list[str], ranks: int, folder: Path, extra: dict[str, str]) -> Finished:
    """The same command line where torch is imported already; several ranks as under plain torchrun."""
    return warm.lptune(["run", *arguments], folder=folder, environment=extra, ranks=ranks, timeout_s=120)


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("full_finetune", "int8_rowcol"),
        # The same loop. A history resumes in recipes/test_divergence.py, a student of a teacher in
        # recipes/test_precompute_logits.py.
        pytest.param("distill", "float8_delayed", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_and_killed_is_bitwise_the_one_that_was_not(
    recipe: str, precision: str, tmp_path: Path
) -> None:
    _, wrong = exact(prepare(tmp_path, _warm, recipe), precision, 1, stops=(4, 7))
    assert wrong == []


@pytest.mark.slow  # the most telling signal; recipes/test_full_finetune.py has one in the suite
def test_no_completed_step_is_lost_to_a_signal(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(0))
    assert run.stop(Case("save", 2, "all", signal.SIGTERM, is_repeated=True)).complaints == ()
    assert run.last_saved() >= 2
    assert run.stop(Case("step", 2, "rank 1", signal.SIGKILL, is_repeated=False)).complaints == ()
    assert run.finish().complaints == ()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hostile")
    done = cold.run("-m", "tests.faults.hostile", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_hostile_files_are_refused_or_read_and_unpickle_start_and_import_nothing(seen: Any) -> None:
    assert len(FILES) == 10
    assert seen["wrong exit codes"] == []
    assert seen["canary"] is False
    assert seen["files"] == {}


def test_training_resume_verify_and_export_unpickle_and_start_nothing(seen: Any) -> None:
    assert seen["training"] == {}


def test_the_hook_sees_what_is_planted(seen: Any) -> None:
    assert {"pickle.find_class", "os.system", "exec"} <= seen["planted"].keys()
