"""lptune/launch/preemption.py in processes of their own: what a signal does, and to whom."""

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune.launch import preemption
from tests.helpers import cold

NUMBERS = (signal.SIGTERM, signal.SIGINT)  # preemption.py treats the others as SIGTERM


@pytest.fixture(autouse=True)
def a_terminal() -> Iterator[None]:
    """Where the tests run under nohup, their processes would inherit that SIGHUP is ignored."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def start(script: str, *arguments: str, **variables: str) -> cold.Process:
    """The script, after it has said that it is ready; a group of its own."""
    code = f"from lptune.launch import preemption\n{textwrap.dedent(script)}"
    process = cold.start("-c", code, *arguments, variables=variables, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.mark.parametrize("number", sorted(preemption.SIGNALS))
def test_before_the_first_question_a_signal_ends_the_process_at_once(number: signal.Signals) -> None:
    process = start("preemption.listen(); print('ready', flush=True); import time; time.sleep(60)")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (143, f"stopped by {number.name}: nothing new to save\n")


GROUP = """
    import subprocess, sys, time
    preemption.listen()
    preemption.requested()
    late = "import sys, time; time.sleep(0.5); sys.exit(7)"
    child = subprocess.Popen([sys.executable, "-c", late])
    print("ready", flush=True)
    while not preemption.requested():
        time.sleep(0.01)
    print(child.wait(), preemption.requested().name)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_group_signal_does_not_reach_the_processes_that_a_run_starts(number: signal.Signals) -> None:
    process = start(GROUP)
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=10)
    assert stdout == f"7 {number.name}\n"
    assert f"{number.name}: the work in progress is finished and saved first" in stderr


def test_a_sighup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = start(GROUP)
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "7 SIGTERM\n"


# In C, as in a collective or a compiler: a Python handler would not run.
BUSY = """
    import ctypes, sys
    preemption.GRACE_S, busy_s = float(sys.argv[1]), int(sys.argv[2])
    preemption.listen()
    preemption.requested()
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(busy_s)
    print(preemption.requested().name)
"""


def test_a_repetition_within_the_grace_interval_changes_nothing() -> None:
    process = start(BUSY, "30", "1")
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.communicate(timeout=10)[0] == "SIGTERM\n"
    assert process.returncode == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_a_repetition_after_it_ends_the_process_at_once(number: signal.Signals) -> None:
    process = start(BUSY, "0.2", "9")
    process.send_signal(number)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 128 + number


def test_a_rank_of_several_leaves_it_to_the_launcher_to_take_a_repetition_for_insistence() -> None:
    process = start(BUSY, "0.2", "1", RANK="0", WORLD_SIZE="2")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "SIGTERM\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_run_is_stopped_cleanly_by_a_signal_before_its_first_line_of_python(
    number: signal.Signals, tmp_path: Path
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, preemption.SIGNALS)  # as a launcher does
    try:
        process = cold.start(*cold.LPTUNE, "run", "full_finetune", "--config", "quickstart", folder=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    process.send_signal(number)
    assert process.communicate(timeout=10) == ("", f"stopped by {number.name}: nothing new to save\n")
    assert process.returncode == 143


BORROWED = """
    import os, signal
    for _ in range(300):
        assert preemption.requested() is None
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
        while preemption.requested() is None:
            pass
        preemption.release()
    print("ready", flush=True)
"""


def test_a_repetition_does_not_outlive_the_session_that_it_was_meant_for() -> None:
    process = start(BORROWED)
    process.communicate(timeout=10)
    assert process.returncode == 0
