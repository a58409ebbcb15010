"""`lptune run --hang-timeout`: no rank goes on, and the one that the others wait for is named.

A run with losses to compare hangs in tests/faults/host_faults.py.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lptune.launch.hangs import Stand, describe
from tests.cli.conftest import linux_only
from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.launch import free_port

pytestmark = linux_only

RECIPE = '''"""A toy without torch, which is imported in one call: the last rank does what output_dir says."""
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from lptune.config import FinetuneConfig

CHILD = "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"


def read_a_file_that_does_not_come() -> None:
    time.sleep(60)


def wait_for_the_last_rank(seconds: float = 60) -> None:
    time.sleep(seconds)


def poll(seconds: float) -> None:
    for _ in range(int(seconds / 0.2)):
        time.sleep(0.2)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def main(cfg: FinetuneConfig) -> None:
    # A monitor, which is not the rank's work.
    threading.Thread(target=poll, args=[60], daemon=True).start()
    if cfg.output_dir == "all" or os.environ["RANK"] == "2":
        if cfg.output_dir in ("sleeps", "all"):
            read_a_file_that_does_not_come()
        if cfg.output_dir == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if cfg.output_dir == "ends":
            return
        if cfg.output_dir == "keeps-the-lock":
            ctypes.PyDLL(None).sleep(60)
        compute(5)
        poll(5)
        subprocess.run(["sh", "-c", f"{sys.executable} -c '{CHILD}'; true"], capture_output=True)
        worker = threading.Thread(target=poll, args=[5])
        worker.start()
        worker.join()
    else:
        wait_for_the_last_rank(22 if cfg.output_dir == "works" else 60)
    print("done")
'''
COLLECTIVE = '''"""Rank 1 is not in the collective that rank 0 has entered."""
import time

from lptune import distributed
from lptune.config import FinetuneConfig


def main(cfg: FinetuneConfig) -> None:
    with distributed.session("cpu") as world:
        for _ in range(3):
            world.barrier()
        if world.rank == 1:
            time.sleep(60)
        world.barrier()
'''


@pytest.fixture
def run(tmp_path: Path, toy: list[str]) -> Callable[..., Finished]:
    """`run("sleeps", 3, "--nnodes=2")`: the toy with --hang-timeout=3."""
    return lambda what, timeout_s, *flags: warm.lptune(
        ["run", *flags, f"--hang-timeout={timeout_s}", *toy, f"output_dir={what}"], folder=tmp_path
    )


@pytest.mark.parametrize(
    ("what", "who", "place"),
    [
        ("stopped", "rank 2 keeps", "its process is stopped (SIGSTOP, or a debugger)"),
        pytest.param(
            "sleeps",
            "rank 2 keeps",
            "in read_a_file_that_does_not_come (FOLDER/toy.py:16)",
            marks=pytest.mark.slow,
        ),
        pytest.param("keeps-the-lock", "rank 2 keeps", "its Python does not answer", marks=pytest.mark.slow),
        pytest.param("ends", "rank 2 keeps", "its process has ended", marks=pytest.mark.slow),
        pytest.param("all", "all 3 ranks wait", "in read_a_file_that_does_not_come", marks=pytest.mark.slow),
    ],
)
def test_a_hang_ends_the_run_and_names_the_rank_that_the_others_wait_for(
    run: Callable[..., Finished], tmp_path: Path, what: str, who: str, place: str
) -> None:
    done = run(what, 3, "--nproc-per-node=3")
    stack, _, line = done.stderr.partition("error: ")
    assert done.returncode == 1
    assert who in line
    assert place.replace("FOLDER", str(tmp_path)) in line
    assert ("time.sleep(60)" in stack) == ("read_a_file" in place)


@pytest.mark.slow
def test_a_rank_that_works_or_waits_for_its_own_is_no_hang_however_long_the_others_wait(
    run: Callable[..., Finished],
) -> None:
    done = run("works", 3, "--nproc-per-node=3")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done"), done.stderr


@pytest.mark.slow  # half a minute; hangs on two hosts are a row of `make faults`
def test_machine_0_asks_the_others_and_all_print_who_hangs(
    run: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "toy.py").write_text(COLLECTIVE)
    # Torch is imported in one call, from a busy disk in seconds.
    flags = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda node: run("any", 15, *flags, f"--node-rank={node}"), (0, 1)))
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert [end.returncode for end in ends] == [1, 1]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "rank 1 keeps the others waiting: 3 of 4 collectives entered, now in main" in lines[0]


def of(
    rank: int, place: str = "wait", entered: int = -1, host: str = "a", stack: str = "stack", **groups: int
) -> Stand:
    """entered: of the group of all; -1: unknown."""
    return Stand(rank, host, place, groups if entered < 0 else groups | {"all": entered}, stack)


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        (
            [of(0, entered=7), of(1, "read", 5), of(2, "read", 5)],
            "ranks 1, 2 keep the others waiting: 5 of 7 collectives entered, now in read",
        ),
        # Behind counts for more than being elsewhere, and no answer for more than being behind.
        ([of(0, "print", 7), of(1, entered=6), of(2, entered=7)], "rank 1 keeps the others waiting: 6 of 7 "),
        ([of(0, entered=7), of(1, entered=6), of(2, "stopped", stack="")], "rank 2 keeps"),
        # A group that rank 2 is not in; one that is cut in two, of which the second waits for rank 3.
        ([of(0, entered=7, pair=5), of(1, entered=6, pair=5), of(2, entered=7)], "rank 1 keeps"),
        (
            [of(rank, entered=(7, 7, 6, 6)[rank], tensor=(9, 9, 8, 7)[rank]) for rank in range(4)],
            "rank 3 keeps the others waiting: 7 of 9",
        ),
        # Without counts it is the rarest place.
        ([of(0), of(1), of(2, "read")], "rank 2 keeps the others waiting: in read"),
        ([of(0, entered=7), of(1, entered=7)], "all 2 ranks wait: in wait"),
        ([of(0, host="a"), of(8, "read", host="b"), of(9, host="b")], "rank 8 on b keeps"),
        (
            [of(rank, entered=1 + (rank == 12)) for rank in range(13)],
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more",
        ),
    ],
    ids=str,
)
def test_the_rank_that_has_entered_the_fewest_collectives_is_named(stands: list[Stand], said: str) -> None:
    line, stack = describe(stands, 600.0)
    assert said in line
    assert "for 600 s" in line
    assert stack == ("" if said == "rank 2 keeps" else "stack")
