"""`lptune run --restarts`: what is started again and what is not, how many times, and who gets the signals.

A toy recipe needs no torch. tests/faults/host_faults.py restarts real runs on several hosts.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import linux_only
from tests.helpers import cold

RECIPE = '''"""A toy: output_dir says what each launch does, e.g. killed-done; `saved` leaves a checkpoint."""
import os
import pathlib
import signal
import sys
import time

from lptune.base.errors import DivergedError, UserError
from lptune.config import FinetuneConfig
from lptune.launch import preemption


def main(cfg: FinetuneConfig) -> None:
    run = pathlib.Path(cfg.output_dir)
    number = len(list(run.glob("pid-*")))
    run.mkdir(exist_ok=True)
    (run / f"pid-{number}").write_text(str(os.getpid()))
    what = cfg.output_dir.split("-")[number]
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write(f'{{"step": {10 * number + 7}}}\\n')
    if what == "saved":
        (run / f"checkpoints/step-{10 * number + 5:08d}").mkdir(parents=True)
    if what in ("saved", "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "bug":
        raise ZeroDivisionError("one thing by nothing")
    if what == "mistake":
        raise UserError("rows.jsonl: line 3: not JSON; mend it")
    if what == "diverged":
        raise DivergedError("step 3: loss nan")
    if what == "waits":
        preemption.requested()
        (run / "waits").touch()
        while not preemption.requested():
            time.sleep(0.02)
        (run / "left").touch()
        sys.exit(143)
    assert what == "done"
    print("done", flush=True)
'''


@pytest.fixture
def launch(tmp_path: Path, toy: list[str]) -> Callable[..., cold.Process]:
    """`launch("killed-done", "--restarts", "1")` starts `lptune run` with this toy."""
    return lambda what, *flags: cold.start(
        *cold.LPTUNE, "run", *flags, *toy, f"output_dir={what}", folder=tmp_path
    )


def said(process: cold.Process) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and what the supervisor said."""
    stdout, stderr = process.communicate(timeout=60)
    lines = [line.removeprefix("restarts: ") for line in stderr.splitlines() if line.startswith("restarts: ")]
    return process.returncode, stdout, lines


def until_it_waits(process: cold.Process, run: Path) -> None:
    while not (run / "waits").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_it_goes_on_from_the_newest_checkpoint_until_the_run_is_done(
    launch: Callable[..., cold.Process],
) -> None:
    code, stdout, lines = said(launch("killed-saved-bug-done", "--restarts", "2"))
    assert code == 0
    assert stdout.endswith("done\n")
    assert lines == [
        "exit code 137: restart 1 of 2 in 1 s, from the beginning: no checkpoint yet; 7 steps are done again",
        # A new checkpoint: the count begins anew.
        "exit code 137: restart 1 of 2 in 1 s, from step 15; 2 steps are done again",
        "exit code 1: restart 2 of 2 in 2 s, from step 15; 12 steps are done again",
    ]


def test_it_ends_with_the_failure_that_comes_again_without_a_new_checkpoint(
    launch: Callable[..., cold.Process], tmp_path: Path
) -> None:
    code, _, lines = said(launch("saved-bug-bug-done", "--restarts", "1"))
    assert code == 1
    assert lines[-1] == "exit code 1: not started again after 1 restarts without a new checkpoint"
    assert len(list((tmp_path / "saved-bug-bug-done").glob("pid-*"))) == 2


@pytest.mark.parametrize(("what", "code"), [("mistake", 2), ("diverged", 3)])
def test_a_wrong_input_and_a_divergence_are_not_tried_again(
    launch: Callable[..., cold.Process], what: str, code: int
) -> None:
    assert said(launch(f"{what}-done", "--restarts", "3"))[::2] == (code, [])


@pytest.mark.parametrize("who", ["supervisor", pytest.param("run", marks=pytest.mark.slow)])
def test_a_signal_to_either_process_stops_the_run_which_saves_first(
    launch: Callable[..., cold.Process], tmp_path: Path, who: str
) -> None:
    process = launch("killed-waits-done", "--restarts", "3")
    run = tmp_path / "killed-waits-done"
    until_it_waits(process, run)
    os.kill(process.pid if who == "supervisor" else int((run / "pid-1").read_text()), signal.SIGTERM)
    assert said(process)[0] == 143
    assert (run / "left").exists()
    assert not (run / "pid-2").exists()


@linux_only
def test_a_run_whose_supervisor_is_killed_saves_and_leaves(
    launch: Callable[..., cold.Process], tmp_path: Path
) -> None:
    process = launch("waits", "--restarts", "3")
    run = tmp_path / "waits"
    until_it_waits(process, run)
    process.kill()
    process.communicate(timeout=60)  # its streams end with the run
    assert (run / "left").exists()
