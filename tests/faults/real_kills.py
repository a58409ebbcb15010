"""SIGKILL at random moments of real runs on two ranks: each resumes and ends as if nothing had happened.

    python -m tests.faults.real_kills --kills 50

`lptune run --nproc-per-node 2`, which saves in the background every step or every second one, is killed at a
random moment of its life: its launcher, one of its ranks, or all of its processes at once. No process may go
on after that. It is started again, and killed again, until it comes to its end; then all weights, moments,
losses and rows must be those of a run that nobody touched. Half of the moments are random between nothing and
a little more than such a run takes, which is start-up for the most part; the others come within a second of a
launch's first line of metrics, so that steps, saves, the export and the end are hit.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lptune.checkpoint import verify
from lptune.checkpoint.manifest import list_checkpoints, step_of
from tests.faults.runs import (
    NUM_STEPS,
    PRECISIONS,
    RECIPES,
    Inputs,
    command,
    descendants,
    outcome,
    prepare,
    processes_naming,
    still_alive,
    uninterrupted,
)
from tests.faults.state import table
from tests.helpers import cold

_PRECISION = PRECISIONS["int8_rowcol, rounded stochastically"]
_MOMENTS = ("start-up", "loading and steps", "saving", "export and end")
_TARGETS = ("the launcher", "rank 0", "rank 1", "all at once")
_ORPHANS_S = 10.0  # a launcher sees a rank that vanished within a second, and then ends the others
_END_S = 300.0
_TRAINING_S = 1.2


class Result:
    """What a series of kills has seen."""

    def __init__(self) -> None:
        self.kills: Counter[tuple[str, str]] = Counter()
        self.num_runs = 0
        self.wrong: list[str] = []

    @property
    def num_kills(self) -> int:
        """Of runs that were alive."""
        return sum(self.kills.values())

    def report(self) -> str:
        """The table."""
        moments = [moment for moment in _MOMENTS if any(each == moment for _, each in self.kills)]
        rows = [[target, *(self.kills[target, moment] for moment in moments)] for target in _TARGETS]
        said = f"{self.num_kills} kills in {self.num_runs} runs: {len(self.wrong)} went wrong"
        return "\n".join([table(["killed", *moments], rows), said, *self.wrong])


def real_kills(inputs: Inputs, kills: int, seed: int) -> Result:
    """`kills` kills of as many runs as that takes; every run is brought to its end."""
    rng, result = random.Random(seed), Result()
    started = time.monotonic()
    expected = outcome(uninterrupted(inputs, "untouched", 2, *_PRECISION))
    longest_s = 1.1 * (time.monotonic() - started)
    while result.num_kills < kills:
        result.num_runs += 1
        every = rng.choice((1, 2))
        output_dir = inputs.folder / f"killed-{result.num_runs}"
        overrides = [
            *_PRECISION,
            f"checkpoint.every_steps={every}",
            f"checkpoint.keep_last={rng.choice((1, 2))}",
        ]
        run = command(inputs, output_dir, 2, *overrides)
        is_over = False
        while not is_over:
            target, in_training = rng.choice(_TARGETS), rng.random() < 0.5
            delay_s = rng.uniform(0, _TRAINING_S if in_training else longest_s)
            if result.num_kills == kills:
                in_training, delay_s = False, _END_S
            is_over, wrong = _launch(run, inputs, output_dir, target, delay_s, in_training, result)
            result.wrong += [
                f"run {result.num_runs}, {target} after {delay_s:.1f} s: {line}" for line in wrong
            ]
            if wrong:
                return result
        found = outcome(output_dir)
        result.wrong += [f"run {result.num_runs}: {line}" for line in found.differences(expected)]
    return result


def _launch(
    run: list[str],
    inputs: Inputs,
    output_dir: Path,
    target: str,
    delay_s: float,
    in_training: bool,
    result: Result,
) -> tuple[bool, list[str]]:
    """Starts the run and kills it `delay_s` later, or later than it first wrote metrics if `in_training`.

    Returns whether it came to its end before, and what went wrong.
    """
    with (inputs.folder / "output").open("w+", encoding="utf-8") as output:
        launcher = cold.start(*run, folder=inputs.folder, stdout=output, stderr=subprocess.STDOUT)
        metrics = output_dir / "metrics.jsonl"
        before = _last_change_ns(metrics)
        while in_training and launcher.poll() is None and _last_change_ns(metrics) == before:
            time.sleep(0.01)
        try:
            launcher.wait(delay_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            output.seek(0)
            if launcher.returncode:
                return True, [f"ended by itself with {launcher.returncode}: {output.read()[-1500:]}"]
            return True, []
        below = descendants(launcher.pid)
        for pid in _victims(target, launcher.pid, below):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
        result.kills[target, _moment(output_dir, below)] += 1
        wrong = []
        try:
            launcher.wait(_ORPHANS_S)
        except subprocess.TimeoutExpired:
            wrong.append("the launcher goes on")
            launcher.kill()
            launcher.wait()
        # By name, too: one may have been started after `below` was read.
        if orphans := still_alive(sorted({*below, *processes_naming(output_dir)}), _ORPHANS_S):
            wrong.append(f"{len(orphans)} processes went on")
    for path in list_checkpoints(output_dir / "checkpoints"):
        verify(path)  # raises: a UserError here is a checkpoint that was published and is none
    return False, wrong


def _last_change_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _victims(target: str, launcher: int, below: list[int]) -> list[int]:
    """Processes to kill; the launcher while there are no ranks yet."""
    ranks = {_rank_of(pid): pid for pid in below}
    if target == "all at once":
        return [launcher, *below]
    name = target.removeprefix("rank ")
    return [ranks[name]] if name in ranks else [launcher]


def _rank_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((each[5:].decode() for each in variables if each.startswith(b"RANK=")), "")


def _moment(output_dir: Path, below: list[int]) -> str:
    """How far the run had come, by its folder."""
    checkpoints = output_dir / "checkpoints"
    if not below or not (output_dir / "metrics.jsonl").exists():
        return "start-up"
    if list(checkpoints.glob(".tmp-step-*")):
        return "saving"
    newest = next(iter(list_checkpoints(checkpoints)), None)
    return "export and end" if newest is not None and step_of(newest) == NUM_STEPS else "loading and steps"


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lptune-real-kills-") as within:
        result = real_kills(prepare(Path(within), recipe=args.recipe), args.kills, args.seed)
    print(result.report())
    print(f"2 ranks, seed {args.seed}, {time.monotonic() - started:.0f} s")
    sys.exit(bool(result.wrong))


if __name__ == "__main__":
    main()
