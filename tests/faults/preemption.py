"""Signals at random moments of real runs: is a completed step ever lost, and is the exit code always 143?

    python -m tests.faults.preemption [--num-signals 50] [--seed 0]

One run of `lptune run full_finetune` is launched again and again, on 1 and 2 ranks, eager and compiled. Each
launch continues the last one and is stopped in a phase of its own: while it starts, while g++ compiles its
first step, in a step, in an evaluation, in a save. The signal goes to the launcher (for one rank, the run's
only process of ours), to every process of the run as Slurm does it, or to one rank only; sometimes twice.
After each: the exit code is 143, nothing reads like a traceback, the newest checkpoint verifies and is of the
last step in metrics.jsonl, and no process is left. After SIGKILL, which leaves no time to save, what was
published before is there. A last launch goes on to the end.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lptune.base.step_folders import list_checkpoints
from lptune.checkpoint.manifest import verify
from tests.faults.runs import KILLED
from tests.helpers import cold
from tests.helpers.tiny_recipe import make_checkpoint, write_config

PHASES = ("start-up", "compile", "step", "evaluation", "save")
TARGETS = ((1, "launcher"), (1, "all"), (2, "launcher"), (2, "all"), (2, "rank 0"), (2, "rank 1"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL)
_MARK = "TEST_OF_PREEMPTION"  # in the environment of every process of a launch
_START_S = {1: 2.5, 2: 5.0}  # of a launch to its first step, about, on two idle cores
_OVERRIDES = {
    "compile": ("compile=block",),
    "evaluation": ("eval_every_steps=2",),
    "save": ("checkpoint.every_steps=1",),
}


class Case(NamedTuple):
    """One signal, or two."""

    phase: str
    num_ranks: int
    target: str
    number: signal.Signals
    is_repeated: bool


class Result(NamedTuple):
    """What came of it."""

    code: int
    num_lost: int
    """Completed steps that the newest checkpoint does not hold."""
    complaints: tuple[str, ...]


def draw_cases(num_signals: int, rng: random.Random) -> list[Case]:
    """Every phase with every target, in random order, as often as needed."""
    grid = list(itertools.product(PHASES, TARGETS))
    rng.shuffle(grid)
    return [
        Case(phase, *target, rng.choice(SIGNALS), rng.random() < 0.3)
        for phase, target in itertools.islice(itertools.cycle(grid), num_signals)
    ]


class Run:
    """A run in `folder` that is launched, stopped and launched again."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self.output = folder / "run"
        data = {"source": "builtin", "seq_len": 128, "eval_fraction": 0.5, "max_rows": 600}
        self._config = write_config(
            folder / "tiny.yaml",
            make_checkpoint(folder / "tiny"),
            self.output,
            data=data,
            schedule={"kind": "constant", "warmup_steps": 0},
            num_steps=1_000_000,
            eval_every_steps=0,
            num_samples=0,
        )

    def stop(self, case: Case) -> Result:
        """Launches the run and stops it as `case` says."""
        before, saved_before = self.last_step(), self.last_saved()
        with self._launched(case.num_ranks, *_OVERRIDES.get(case.phase, ())) as (process, mark, said):
            self._await(case, process, mark, said, before)
            for repetition in range(1 + case.is_repeated):
                time.sleep(repetition * self._rng.uniform(0.1, 2.0))
                _send(case, process, mark)
            try:
                code = process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                return Result(process.wait(), 0, ("did not end within 120 s",))
            complaints = []
            if "Traceback" in said():
                complaints.append(said())
            if not _until(lambda: not _processes(mark), within_s=20):
                complaints.append(f"processes left: {_processes(mark)}")
                for pid in _processes(mark):
                    os.kill(pid, signal.SIGKILL)
        steps = self.steps()
        if steps != list(range(1, len(steps) + 1)):
            complaints.append(f"steps in metrics.jsonl: {steps}")
        saved = self.last_saved()
        if saved_before > saved:
            complaints.append(f"the checkpoint of step {saved_before} is lost, the newest is that of {saved}")
        # A launch that was stopped while it started may have an earlier one's lines before it.
        num_lost = self.last_step() - saved if self.last_step() != before else 0
        if case.number == signal.SIGKILL:
            num_lost, is_right = 0, code in KILLED
        else:
            is_right = code == 143 or (case.phase == "start-up" and code == -case.number)
        if num_lost or not is_right:
            complaints.append(f"exit code {code}, {num_lost} steps lost")
        return Result(code, num_lost, tuple(complaints))

    def finish(self) -> Result:
        """Goes on for two steps, to the end."""
        last = self.last_step() + 2
        with self._launched(1, f"num_steps={last}", "eval_every_steps=2") as (process, _, said):
            code = process.wait(120)
            lost = last - self.last_saved()
            good = code == 0 and not lost and (self.output / "export").is_dir()
            return Result(code, lost, () if good else (said(),))

    def steps(self) -> list[int]:
        """Those that metrics.jsonl has completed."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["step"] for record in records if "loss" in record]

    def last_step(self) -> int:
        """The last one that metrics.jsonl has completed; 0 for none."""
        return max(self.steps(), default=0)

    def last_saved(self) -> int:
        """The step of the newest checkpoint, which has to verify; 0 without one."""
        newest = next(iter(list_checkpoints(self.output / "checkpoints")), None)
        return verify(newest).step if newest else 0

    @contextlib.contextmanager
    def _launched(
        self, num_ranks: int, *overrides: str
    ) -> Iterator[tuple[cold.Process, str, Callable[[], str]]]:
        mark = uuid.uuid4().hex
        output = self._folder / f"{mark}.out"
        command = [*cold.LPTUNE, "run"]
        command += [f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
        command += ["full_finetune", "--config", str(self._config), *overrides]
        # A cold cache: the compiler is at work when the signal comes.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / mark)} if "compile=block" in overrides else {}
        with (
            output.open("w") as file,
            cold.start(
                *command,
                folder=self._folder,
                variables=cache | {_MARK: mark},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process, mark, output.read_text
            finally:
                process.kill()

    def _await(
        self,
        case: Case,
        process: cold.Process,
        mark: str,
        said: Callable[[], str],
        before: int,
    ) -> None:
        """Returns at a random moment of the phase."""

        def until(condition: Callable[[], object]) -> None:
            if not _until(lambda: process.poll() is not None or condition(), within_s=120):
                raise TimeoutError(f"{case}: the phase did not come:\n{said()}")

        uniform = self._rng.uniform
        if case.phase == "start-up":
            time.sleep(uniform(0, _START_S[case.num_ranks]))
            if case.target.startswith("rank"):
                until(lambda: _rank(mark, case.target))
        elif case.phase == "compile":
            until(lambda: "cc1plus" in map(_name, _processes(mark)))
            time.sleep(uniform(0, 8))
        elif case.phase == "save":
            until(lambda: any(self.output.glob("checkpoints/.tmp-step-*")))
        elif case.phase == "evaluation":
            until(lambda: self.last_step() > before and self.last_step() % 2 == 1)
            time.sleep(uniform(0, 0.3))
        else:
            until(lambda: self.last_step() > before)
            time.sleep(uniform(0, 0.3))


def _send(case: Case, process: cold.Process, mark: str) -> None:
    pids: Iterable[int] = [process.pid]
    if case.target == "all":
        pids = _processes(mark)
    elif case.target != "launcher":
        pids = _rank(mark, case.target)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, case.number)


def _processes(mark: str) -> list[int]:
    """Those of the launch, compilers and other helpers included."""
    line = f"{_MARK}={mark}"
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if line in _environment(pid)]


def _rank(mark: str, name: str) -> list[int]:
    wanted = f"RANK={name.removeprefix('rank ')}"
    candidates = [pid for pid in _processes(mark) if wanted in _environment(pid)]
    return candidates and [min(candidates)]  # its helpers have its environment, too


def _environment(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _until(condition: Callable[[], object], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def table(results: Sequence[tuple[Case, Result]]) -> str:
    """Phase by target: signals that ended as they should, and steps lost."""
    num, stopped, lost = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for case, result in results:
        cell = (case.phase, f"{case.target} of {case.num_ranks}")
        num[cell] += 1
        stopped[cell] += not result.complaints
        lost[cell] += result.num_lost
    names = [f"{target} of {num_ranks}" for num_ranks, target in TARGETS]
    lines = ["| signal to | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for phase in PHASES:
        cells = [f"{stopped[phase, name]}/{num[phase, name]}, {lost[phase, name]}" for name in names]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Stop real runs by signals at random moments.")
    parser.add_argument("--num-signals", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it, as they should
    rng = random.Random(options.seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), rng)
        for case in draw_cases(options.num_signals, rng):
            result = run.stop(case)
            results.append((case, result))
            twice = " twice" if case.is_repeated else ""
            print(
                f"{case.number.name}{twice} to {case.target} of {case.num_ranks}, {case.phase}: "
                f"exit {result.code}, step {run.last_step()}, {result.num_lost} lost",
                *result.complaints,
                sep="\n  ",
                flush=True,
            )
        end = run.finish()
    print(*end.complaints, sep="\n")
    print(f"\nRight ends of signals, and steps lost (seed {options.seed}):\n\n{table(results)}")
    return int(any(result.complaints for _, result in results) or bool(end.complaints))


if __name__ == "__main__":
    sys.exit(main())
