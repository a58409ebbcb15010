"""Several machines: two launchers on this one, over the loopback device, and the Slurm script with a pretended srun.

The launchers are forked off a process that has imported torch (tests/helpers/warm.py). Their ranks are processes of
their own; a toy recipe that needs no torch costs a third of a second each.
"""

# ruff: noqa: E501  (messages are compared whole)

import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path

import pytest

from lptune.config import FinetuneConfig, load_config
from lptune.launch.rendezvous import digest_of
from tests.cli.conftest import linux_only
from tests.helpers import cold, warm
from tests.helpers.cold import ROOT, Finished
from tests.helpers.launch import free_port

RECIPE = '''"""A toy: rank and what it does are the config's output_dir, e.g. bug-2. The others wait, as in a collective, and note SIGTERM."""
import os
import signal
import sys
import time

from lptune.base.errors import DivergedError, UserError
from lptune.config import FinetuneConfig
from lptune.launch import preemption

RANK = int(os.environ["RANK"])


def main(cfg: FinetuneConfig) -> None:
    what, _, who = cfg.output_dir.partition("-")
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']}", flush=True)
    os.system(f"echo a library of rank {RANK} writes this >&2")
    if what == "done":
        return
    if what == "mistake":
        raise UserError("rows.jsonl: line 3: not JSON; mend it")
    if (what, RANK) != ("stopped", int(who)):
        preemption.requested()
    with open("waiting", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while sum(1 for _ in open("waiting")) < 2:
        time.sleep(0.05)
    if RANK == int(who):
        with open("failed_at", "w") as file:
            file.write(repr(time.time()))
        if what == "bug":
            raise ZeroDivisionError("one thing by nothing")
        if what == "diverged":
            raise DivergedError("step 3: loss nan")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
    elif what == "killed":
        time.sleep(0.3)
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:64650")
    time.sleep(60)
'''


def two_machines(
    folder: Path, toy: list[str], what: str, *, numbered: bool = True, of_second: tuple[str, ...] = ()
) -> tuple[Finished, Finished, float]:
    """Both launchers' ends, of one rank each, and the seconds from the failure to the later of them."""
    port = free_port()

    def launcher(node: int) -> Finished:
        flags = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}"]
        if numbered:
            flags += [f"--node-rank={node}"]
        keys = (f"output_dir={what}", *(of_second if node else ()))
        return warm.lptune(["run", *flags, *toy, *keys], folder=folder)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(launcher, (0, 1))
    failed_at = folder / "failed_at"
    return first, second, time.time() - float(failed_at.read_text()) if failed_at.exists() else 0.0


@linux_only
def test_rank_0_prints_and_the_others_write_logs_into_the_output_folder(
    tmp_path: Path, toy: list[str]
) -> None:
    first, second, _ = two_machines(tmp_path, toy, "done", numbered=False)
    assert (first.returncode, second.returncode) == (0, 0)
    # The machines are numbered as they come.
    nothing, printed = sorted([first.stdout, second.stdout])
    assert nothing == ""
    assert printed.startswith("recipe     toy.py")
    assert printed.endswith("\nrank 0 of 2\n")
    # In a run of no time at all torch may complain that the rendezvous has ended under its feet.
    said = [line for line in (first.stderr + second.stderr).splitlines() if "library" in line]
    assert said == ["a library of rank 0 writes this"]
    assert [log.name for log in (tmp_path / "done/logs").iterdir()] == ["rank-1.log"]
    header, *lines = (tmp_path / "done/logs/rank-1.log").read_text().splitlines()
    assert header.startswith("--- ")
    assert f"rank 1 of 2 on {socket.gethostname()}" in header
    assert lines == ["rank 1 of 2", "a library of rank 1 writes this"]


@linux_only
def test_a_mistake_of_all_ranks_is_one_line_on_each_machine_and_makes_no_folder(
    tmp_path: Path, toy: list[str]
) -> None:
    for done, who in zip(two_machines(tmp_path, toy, "mistake")[:2], ("", "rank 1: "), strict=True):
        assert done.returncode == 2
        own = [line for line in done.stderr.splitlines() if "library" not in line]
        assert own == [f"error: {who}rows.jsonl: line 3: not JSON; mend it"]
    assert not (tmp_path / "mistake").exists()


@linux_only
def test_a_command_that_differs_on_one_machine_is_one_line_on_both(tmp_path: Path, toy: list[str]) -> None:
    first, second, _ = two_machines(tmp_path, toy, "done", of_second=("seed=7",))
    host = socket.gethostname()
    line = (
        f"error: run: seed: 0 on {host}, 7 on {host}; give all machines the same command, config and recipe\n"
    )
    assert [(done.returncode, done.stderr) for done in (first, second)] == [(2, line)] * 2
    assert not (tmp_path / "done").exists()


@linux_only
@pytest.mark.parametrize(
    ("what", "code", "told", "own"),
    [
        ("bug-1", 1, "error: rank 1 on HOST: ZeroDivisionError: one thing by nothing (the traceback stands in the output there)", "rank 1:\nTraceback"),
        pytest.param("killed-1", 137, "error: on HOST: rank 1 was killed by SIGKILL", "error: rank 1 was killed by SIGKILL\n", marks=pytest.mark.slow),
        ("stopped-1", 143, "stopped by SIGTERM: nothing new to save", "stopped by SIGTERM: nothing new to save\n"),
        pytest.param("diverged-0", 3, "error: rank 0 on HOST: step 3: loss nan", "error: step 3: loss nan\n", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_ranks_failure_ends_both_machines_in_seconds_with_one_cause(
    tmp_path: Path, toy: list[str], what: str, code: int, told: str, own: str
) -> None:
    *ends, after_s = two_machines(tmp_path, toy, what)
    failing = int(what[-1])
    here, there = ends[failing], ends[1 - failing]
    assert (here.returncode, there.returncode) == (code, code)
    # torchrun would give the rank that ignores SIGTERM 30 s, and the other machine's 60.
    assert after_s < 15
    assert told.replace("HOST", socket.gethostname()) in there.stderr.splitlines()
    assert own in here.stderr
    for text in (here.stderr, there.stderr):
        assert text.count("ZeroDivisionError: one thing by nothing") == (what == "bug-1")
        assert "Connection closed" not in text
    assert all(not Path(f"/proc/{pid}").exists() for pid in (tmp_path / "waiting").read_text().split())
    if what == "killed-1":  # the consequence went to its log, or nowhere: rank 0 has none
        return
    if what == "bug-1":
        assert "ZeroDivisionError" in (tmp_path / "bug-1/logs/rank-1.log").read_text()


def test_a_port_in_use_is_one_line(tmp_path: Path, toy: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--nnodes=2", "--rdzv-backend=static", "--node-rank=0", f"--rdzv-endpoint={address}"]
        done = warm.lptune(["run", *flags, *toy], folder=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert f"rendezvous at {address}: " in line
    assert "a port that is free there" in line


def test_a_machine_that_does_not_come_is_no_wrong_input_so_that_the_run_is_tried_again(
    tmp_path: Path, toy: list[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ["--nnodes=2", f"--rdzv-endpoint={address}", "--rdzv-conf=join_timeout=1"]
    done = warm.lptune(["run", *flags, *toy], folder=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert f"rendezvous at {address}: after 1 s: 1 of 2 have not come (here: {socket.gethostname()})" in line


COLLECTIVE = '''"""Real ranks: rank 1 fails while rank 0 waits for it in a collective."""
import os
import time

from lptune import distributed
from lptune.config import FinetuneConfig


def main(cfg: FinetuneConfig) -> None:
    with distributed.session("cpu", seed=cfg.seed) as world:
        world.barrier()
        if world.rank == 1:
            raise ZeroDivisionError("one thing by nothing")
        world.barrier()
'''


@linux_only
@pytest.mark.slow  # ranks that import torch; which of two failures is the cause: test_run.py, and bug-1 above
def test_a_rank_that_fails_beside_a_collective_is_the_cause_and_not_its_peer(
    tmp_path: Path, toy: list[str]
) -> None:
    (tmp_path / "toy.py").write_text(COLLECTIVE)
    first, second, _ = two_machines(tmp_path, toy, "any")
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stderr.startswith(f"error: rank 1 on {socket.gethostname()}: ZeroDivisionError: ")
    assert second.stderr.startswith("rank 1:\nTraceback")
    assert second.stderr.count("Traceback") == 1


PREEMPTED = '''"""Saves on a signal like the session's ranks."""
import os
import pathlib
import sys
import time

from lptune.config import FinetuneConfig
from lptune.launch import preemption

RANK = os.environ["RANK"]


def main(cfg: FinetuneConfig) -> None:
    preemption.requested()
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()} ")
    while not preemption.requested():
        time.sleep(0.05)
    pathlib.Path(f"saved-{RANK}").touch()
    sys.exit(143)
'''

# What the script uses of Slurm. scontrol's requeue is a file, as the test runs the script again by itself.
COMMANDS = {
    "scontrol": 'case "$1" in show) echo 127.0.0.1;; requeue) echo "$2" > requeued;; esac',
    "srun": (
        "for node in 0 1; do\n"
        '  (while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=$node exec "$@") & pids="${pids:-} $!"\n'
        "done\n"
        "highest=0\n"
        'for pid in $pids; do wait "$pid"; code=$?; [ $code -gt $highest ] && highest=$code; done\n'
        "exit $highest"
    ),
    "lptune": f'exec {" ".join(cold.command(*cold.LPTUNE))} "$@"',
}


@linux_only
def test_the_slurm_script_saves_before_the_time_limit_and_requeues(tmp_path: Path, toy: list[str]) -> None:
    (tmp_path / "toy.py").write_text(PREEMPTED)
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    environment = cold.environment() | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port() - 20000 + 10000),  # makes that port
        "SLURM_JOB_NODELIST": "any",
        "SLURM_NNODES": "2",
        "RANKS_PER_NODE": "1",
    }
    command = ["bash", str(ROOT / "examples/slurm/full_finetune.sbatch"), *toy, "output_dir=out"]

    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    pids: set[int] = set()
    while len(pids) < 4:  # both ranks, both launchers
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
        pids = {int(pid) for file in tmp_path.glob("pids") for pid in file.read_text().split()}
    for pid in pids:  # as Slurm does it: to every process of the step
        os.kill(pid, signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143
    start = r"loading torch( \.\.\.|: [\d.]+ s)"  # the second where it took long
    assert re.fullmatch(start, output.splitlines()[-1]), "nothing after the start"
    assert {file.name for file in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert (tmp_path / "requeued").read_text() == environment["SLURM_JOB_ID"] + "\n"


@linux_only
def test_a_launcher_that_comes_after_the_end_ends_at_once(tmp_path: Path, toy: list[str]) -> None:
    """The others have left: it would wait for them, and fail. With another config it does wait."""
    run = tmp_path / "done"
    (run / "checkpoints/step-00000003").mkdir(parents=True)
    (run / "export").mkdir()
    flags = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=join_timeout=1"]
    command = ["run", *flags, *toy, "output_dir=done"]
    with chdir(tmp_path):
        cfg = load_config(FinetuneConfig, Path(toy[toy.index("--config") + 1]), ["output_dir=done"])
    about = {"id": "1a2b3c4d", "done": {"step": 3, "config": digest_of(cfg)}}
    (run / "run.json").write_text(json.dumps(about))
    ended = warm.lptune(command, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("already finished: done/run.json says so, of step 3 and this config;")
    for change in (["seed=1"], ["resume=none"]):
        assert warm.lptune([*command, *change], folder=tmp_path).returncode == 1
    (run / "export").rmdir()  # which is to be made again
    assert warm.lptune(command, folder=tmp_path).returncode == 1
