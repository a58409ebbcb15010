"""`lptune run` with toy recipes: exit codes, messages and signals, in this process and through torchrun."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lptune.launch.flags import check, parser
from lptune.launch.outcome import Outcome
from tests.cli.conftest import Command, Lptune, linux_only
from tests.helpers import cold, warm
from tests.helpers.slow import slow_but

RECIPE = '''"""A toy: what it does is the config's output_dir."""
import os
import signal
import sys
import time

from lptune.base.errors import DivergedError, UserError
from lptune.config import FinetuneConfig
from lptune.launch import preemption

RANK = int(os.environ.get("RANK", "0"))


def say(text):
    print(text, flush=True)
    with open("said", "a") as file:
        file.write(text + "\\n")


def main(cfg: FinetuneConfig) -> None:
    say(f"rank {RANK} of {os.environ.get('WORLD_SIZE')} seed {cfg.seed} pid {os.getpid()}")
    what = cfg.output_dir
    if what == "mistake":
        raise UserError("rows.jsonl: line 3: not JSON; mend it")
    if what == "mistake-of-rank-1":
        if RANK == 1:
            time.sleep(0.2)
            raise UserError("rows.jsonl: line 3: only here")
        time.sleep(60)
    if what == "mistake-breaks-the-peer":
        if RANK == 1:
            raise UserError("rows.jsonl: line 3: only here")
        raise RuntimeError("connection closed by peer")
    if what == "lost":
        if RANK == 1:
            time.sleep(60)
        fails = "raise RuntimeError('[/a/b/pair.cc:537] Connection closed by peer [127.0.0.1]:1. GLHF!')"
        exec(compile(f"def all_gather(): {fails}\\nall_gather()", "/x/torch/distributed/c10d.py", "exec"))
    if what == "bug":
        raise ZeroDivisionError("one thing by nothing")
    if what == "diverged":
        raise DivergedError("step 3: loss nan")
    if what.startswith("exit-"):
        sys.exit(int(what.removeprefix("exit-")))
    if what == "killed" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "saves":
        preemption.requested()
        say("waiting")
        while not preemption.requested():
            time.sleep(0.05)
        time.sleep(1.0)
        say(f"rank {RANK} saved")
        sys.exit(143)
    if what == "stays":
        preemption.requested()
    if what in ("killed", "stays", "sleep"):
        say("waiting")
        time.sleep(60)
'''


CASES = [
    ("done", 0, ""),
    ("mistake", 2, "error: rows.jsonl: line 3: not JSON; mend it\n"),
    ("diverged", 3, "error: step 3: loss nan\n"),
    ("exit-143", 143, ""),
]


@pytest.mark.parametrize(("what", "code", "stderr"), CASES)
def test_one_rank_runs_in_process_and_keeps_the_exit_code(
    tmp_path: Path, lptune: Lptune, toy: list[str], what: str, code: int, stderr: str
) -> None:
    arguments = ["run", *toy, f"output_dir={what}", "seed=7"]
    done = lptune(*arguments) if what == "mistake" else warm.lptune(arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (code, stderr)
    assert "rank 0 of None seed 7" in done.stdout


@pytest.mark.parametrize(("what", "code", "stderr"), CASES[:3])
def test_two_ranks_keep_the_exit_code_and_print_a_mistake_once(
    tmp_path: Path, toy: list[str], what: str, code: int, stderr: str
) -> None:
    arguments = ["run", "--nproc-per-node", "2", *toy, f"output_dir={what}", "seed=7"]
    done = warm.lptune(arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (code, stderr)
    if what == "done":
        printed = [line.partition(" seed")[0] for line in done.stdout.splitlines()]
        assert [line for line in printed if line.startswith("rank")] == ["rank 0 of 2"]
        assert [line[:6] for line in printed].count("recipe") == 1, "one banner"
        assert done.stdout.count("loading torch ...") == 1


@pytest.mark.parametrize("what", ["mistake-of-rank-1", "mistake-breaks-the-peer"])
def test_the_mistake_of_one_rank_is_printed_without_its_peers_collateral_errors(
    tmp_path: Path, toy: list[str], what: str
) -> None:
    arguments = ["run", "--nproc-per-node=2", *toy, f"output_dir={what}"]
    done = warm.lptune(arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: rank 1: rows.jsonl: line 3: only here\n")


def test_a_rank_that_lost_its_peer_is_not_the_cause_though_it_fails_first() -> None:
    lost = Outcome(rank=0, code=1, time_ns=1, host="a", line="", traceback="Traceback", lost_peer=True)
    bug = lost._replace(rank=1, time_ns=2, lost_peer=False)
    assert sorted((lost, bug), key=lambda outcome: outcome.precedence) == [bug, lost]


def test_a_lost_peer_is_one_line_and_its_traceback_stands_in_the_log(tmp_path: Path, toy: list[str]) -> None:
    done = warm.lptune(["run", "--nproc-per-node=2", *toy, "output_dir=lost"], folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"error: rank 0 lost another rank in all_gather \(toy\.py:\d+\), and none said why: was a machine "
        r"or a launcher killed\? RuntimeError: \[pair\.cc:537\] Connection closed by peer "
        r"\[127\.0\.0\.1\]:1; rank-0\.log says more",
        line,
    ), line
    header, *lines = (tmp_path / "lost/logs/rank-0.log").read_text().splitlines()
    assert " rank 0 on " in header
    assert lines[0].startswith("Traceback")
    assert lines[-1].endswith("GLHF!")


def test_a_bug_shows_its_traceback_and_exits_1(tmp_path: Path, toy: list[str]) -> None:
    for flags in ([], ["--nproc-per-node=2"]):
        done = warm.lptune(["run", *flags, *toy, "output_dir=bug"], folder=tmp_path)
        assert done.returncode == 1
        assert "ZeroDivisionError: one thing by nothing" in done.stderr
        assert "ChildFailedError" not in done.stderr


def test_a_killed_rank_is_named(tmp_path: Path, toy: list[str]) -> None:
    done = warm.lptune(["run", "--nproc-per-node", "2", *toy, "output_dir=killed"], folder=tmp_path)
    assert (done.returncode, done.stderr) == (137, "error: rank 1 was killed by SIGKILL\n")


def start(tmp_path: Path, toy: list[str], what: str) -> tuple[Any, list[int]]:
    """A launcher whose two ranks are waiting, and their process ids. What it says is in `tmp_path`."""
    arguments = ["run", "--nproc-per-node=2", *toy, f"output_dir={what}"]
    # A killed launcher leaves its folder.
    launcher = warm.start(arguments, tmp_path, {"TMPDIR": str(tmp_path)}, tmp_path)
    return launcher, waiting(tmp_path, launcher.is_alive)


def waiting(tmp_path: Path, is_alive: Callable[[], bool]) -> list[int]:
    """The process ids of two ranks, once both wait (each says so in a file)."""
    said: list[str] = []
    while said.count("waiting") < 2:
        assert is_alive()
        time.sleep(0.05)
        said = (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
    return [int(line.split()[-1]) for line in said if "pid" in line]


def wait_until_gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if not any(Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in status(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ"


@linux_only
def test_ranks_die_with_a_killed_launcher(tmp_path: Path, toy: list[str]) -> None:
    launcher, pids = start(tmp_path, toy, "sleep")
    launcher.kill()
    launcher.join()
    assert wait_until_gone(pids)


@linux_only
def test_ranks_that_started_after_the_launcher_died_leave_at_once(tmp_path: Path, toy: list[str]) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LPTUNE_LAUNCHER_PID": "1"}
    if os.getpid() == 1:
        pytest.skip("this process is the launcher that the test pretends is gone")
    done = cold.run(*cold.LPTUNE, "run", *toy, folder=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    line = "error: the launcher that started this rank is gone; unset LPTUNE_LAUNCHER_PID if none did\n"
    assert done.stderr == line


@linux_only
@pytest.mark.parametrize(
    ("to_launcher", "number"),
    slow_but(
        lambda _, number: number in (signal.SIGINT, signal.SIGUSR1),
        [(True, signal.SIGINT), (True, signal.SIGHUP), (False, signal.SIGTERM), (False, signal.SIGUSR1)],
    ),
)
def test_a_signal_before_anything_was_trained_ends_all_ranks_at_once_with_one_line(
    tmp_path: Path, toy: list[str], to_launcher: bool, number: signal.Signals
) -> None:
    launcher, pids = start(tmp_path, toy, "sleep")
    os.kill(launcher.pid if to_launcher else pids[0], number)
    launcher.join(30)
    line = f"stopped by {number.name}: nothing new to save"
    said = (tmp_path / "stderr").read_text()
    assert (launcher.exitcode, said.splitlines()[-1]) == (143, line)
    assert ("Ctrl-C again after 5 s ends at once" in said) == (to_launcher and number == signal.SIGINT)
    assert wait_until_gone(pids)


@linux_only
def test_a_second_sigterm_does_not_interrupt_the_save(tmp_path: Path, toy: list[str]) -> None:
    launcher, _ = start(tmp_path, toy, "saves")
    for _ in range(3):
        launcher.terminate()
        time.sleep(0.1)
    launcher.join(30)
    assert launcher.exitcode == 143
    assert (tmp_path / "stdout").read_text().endswith("rank 0 saved\n")
    assert (tmp_path / "saves/logs/rank-1.log").read_text().endswith("\nrank 1 saved\n")


@linux_only
def test_a_signal_after_the_grace_interval_ends_all_ranks_at_once(tmp_path: Path, toy: list[str]) -> None:
    main = (
        "from lptune.launch import preemption; from lptune.cli.main import main; preemption.GRACE_S = 0.3; "
    )
    main += f"main(['run', '--nproc-per-node=2', *{toy}, 'output_dir=stays'])"
    launcher = cold.start("-c", main, folder=tmp_path, variables={"TMPDIR": str(tmp_path)})
    pids = waiting(tmp_path, lambda: launcher.poll() is None)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=10)
    assert (launcher.returncode, stderr.count("\n")) == (130, 1)
    assert "Ctrl-C again after 0 s ends at once" in stderr
    assert wait_until_gone(pids)
    assert list(tmp_path.glob("lptune-*")) == []


def test_a_recipe_may_bring_its_own_config_class(command: Command, toy: list[str], tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine:\n    width: int = 3\n\n"
        "def main(cfg: Mine) -> None:\n    print(cfg.width)\n"
    )
    (tmp_path / "toy.yaml").write_text("width: 4\n")
    assert command("run", *toy) == (0, "4\n", "")
    assert "unknown key 'widht' (did you mean 'width'?)" in command("run", *toy, "widht=5")[2]


def test_looking_at_torchruns_flags_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check(parser().parse_args(["--standalone", "--nproc-per-node=2", "recipe"]))
    assert list(tmp_path.iterdir()) == []
