"""Runs of the real command line on a tiny model, and what is left of them to compare."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lptune.checkpoint.manifest import list_checkpoints, step_of
from tests.faults import observe
from tests.faults.state import digests, stored_tensors
from tests.helpers import cold
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_checkpoint, write_config, write_preferences

NUM_STEPS = 12
STEPS_PER_EPOCH = 4
_EXACT = ("loss", "grad_norm", "lr", "num_target_tokens")

PRECISIONS = {
    "none": ("precision.kind=none",),
    "int8_rowcol, rounded stochastically": (
        "precision.kind=int8_rowcol",
        "precision.stochastic_rounding=true",
    ),
    "float8_delayed": ("precision.kind=float8_delayed", "precision.emulate=true"),
}


Launch = Callable[[list[str], int, Path, dict[str, str]], Finished]
"""`lptune ARGUMENTS` on so many ranks in a folder, with further variables of the environment."""


def launch(arguments: list[str], ranks: int, folder: Path, extra: dict[str, str]) -> Finished:
    """As a user does it."""
    flags = [f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return cold.run(*cold.LPTUNE, "run", *flags, *arguments, folder=folder, timeout_s=600, **extra)


class Inputs(NamedTuple):
    """What all runs have in common."""

    config: Path
    recipe: Path
    folder: Path
    launch: Launch


RECIPES = ("full_finetune", "full_dpo")


def prepare(folder: Path, launch: Launch = launch, recipe: str = "full_finetune") -> Inputs:
    """A tiny checkpoint, a config of three epochs and a `recipe` that observes itself, in `folder`."""
    source = "builtin"
    if recipe == "full_dpo":
        source = str(write_preferences(folder / "preferences.jsonl", 8 * STEPS_PER_EPOCH))
    data = {
        "source": source,
        "seq_len": 128,
        "packing": False,
        "max_rows": 8 * STEPS_PER_EPOCH,
    }
    config = write_config(
        folder / "tiny.yaml",
        make_checkpoint(folder / "tiny"),
        folder / "unused",
        data=data,
        optimizer={"lr": 1.0e-3},
        num_steps=NUM_STEPS,
        eval_every_steps=0,
        checkpoint={"every_steps": 3, "keep_last": 9},
    )
    return Inputs(config, observe.write_recipe(folder / "observed.py", recipe), folder, launch)


def arguments(inputs: Inputs, output_dir: Path, *overrides: str) -> list[str]:
    """Of `lptune run`, after its flags."""
    return [str(inputs.recipe), "--config", str(inputs.config), f"output_dir={output_dir}", *overrides]


def command(inputs: Inputs, output_dir: Path, ranks: int, *overrides: str) -> list[str]:
    """`lptune run` on several ranks, for cold.start."""
    return [*cold.LPTUNE, "run", f"--nproc-per-node={ranks}", *arguments(inputs, output_dir, *overrides)]


def run_part(
    inputs: Inputs, output_dir: Path, ranks: int, *overrides: str, stop_after: int | None = None
) -> str | None:
    """The run, from where it stands to its end or to a SIGTERM on its last rank; what went wrong, or None."""
    extra = {} if stop_after is None else {observe.STOP_AFTER: str(stop_after)}
    extra[observe.STOP_ON_RANK] = str(ranks - 1)
    done = inputs.launch(arguments(inputs, output_dir, *overrides), ranks, inputs.folder, extra)
    wanted = 0 if stop_after is None else 143
    if done.returncode != wanted:
        return f"exit code {done.returncode} instead of {wanted}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    if (
        stop_after is not None
        and (newest := step_of(list_checkpoints(output_dir / "checkpoints")[0])) != stop_after
    ):
        return f"stopped after step {newest} instead of {stop_after}"
    return None


class Outcome(NamedTuple):
    """What a finished run leaves."""

    steps: dict[int, list[Any]]
    """Step -> loss, gradient norm, learning rate, number of target tokens."""
    batches: dict[int, list[str]]
    state: dict[str, str]
    """sha256 of each tensor of the last checkpoint."""

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [self.steps[step][0] for step in sorted(self.steps)]

    def differences(self, other: "Outcome") -> list[str]:
        """What is not the same to the bit."""
        wrong = []
        for step in sorted(self.steps.keys() | other.steps.keys()):
            for what, ours, theirs in zip(
                (*_EXACT, "batches"),
                [*self.steps.get(step, [None] * len(_EXACT)), self.batches.get(step)],
                [*other.steps.get(step, [None] * len(_EXACT)), other.batches.get(step)],
                strict=True,
            ):
                if ours != theirs:
                    wrong.append(f"step {step}: {what} {ours!r} instead of {theirs!r}")
        names = self.state.keys() | other.state.keys()
        changed = sorted(name for name in names if self.state.get(name) != other.state.get(name))
        if changed:
            wrong.append(f"{len(changed)} of {len(names)} tensors differ, {changed[0]} for one")
        return wrong


def outcome(output_dir: Path) -> Outcome:
    """Reads it; the metrics hold every step once."""
    lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    numbers = [record["step"] for record in records]
    assert numbers == list(range(1, NUM_STEPS + 1)), f"{output_dir}: metrics of steps {numbers}"
    newest = list_checkpoints(output_dir / "checkpoints")[0]
    assert step_of(newest) == NUM_STEPS, newest
    batches = observe.read_batches(output_dir)
    for first in range(1, NUM_STEPS, STEPS_PER_EPOCH):
        epoch = [row for step in range(first, first + STEPS_PER_EPOCH) for row in batches[step]]
        assert len(epoch) == len(set(epoch)), f"a row twice in the epoch that begins with step {first}"
    return Outcome(
        {record["step"]: [record[key] for key in _EXACT] for record in records},
        batches,
        digests(stored_tensors(newest)),
    )


def uninterrupted(inputs: Inputs, name: str, ranks: int, *overrides: str) -> Path:
    """The folder of a finished run without an interruption; made once."""
    output_dir = inputs.folder / name
    if not (output_dir / "export.json").exists():
        shutil.rmtree(output_dir, ignore_errors=True)
        wrong = run_part(inputs, output_dir, ranks, *overrides)
        assert wrong is None, wrong
    return output_dir


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in tasks.read_text(encoding="ascii").split()]
            except OSError:  # ended meanwhile
                continue
            found += children
            queue += children
    return found


def processes_naming(path: Path) -> list[int]:
    """Those with `path` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() + b"\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # ended meanwhile
            continue
    return found


def still_alive(pids: list[int], within_s: float) -> list[int]:
    """Those that have not ended after that time; they are killed then."""
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")
