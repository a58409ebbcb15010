"""Runs of the real command line on a tiny model, and what is left of them to compare."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lptune.base.step_folders import list_checkpoints, step_of
from tests.faults import observe
from tests.faults.state import digests, stored_tensors
from tests.helpers import cold
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import (
    make_checkpoint,
    make_teacher,
    write_config,
    write_labelled,
    write_preferences,
    write_rows,
    write_texts,
)

NUM_STEPS = 12
STEPS_PER_EPOCH = 4
_NOT_REPEATABLE = {"tokens_per_s", "step_time_s", "compile_time_s", "peak_memory_gib", "time"}

PRECISIONS = {
    "none": ("precision.kind=none",),
    "int8_rowcol": ("precision.kind=int8_rowcol", "precision.stochastic_rounding=true"),
    "float8_delayed": ("precision.kind=float8_delayed", "precision.emulate=true"),
}


Launch = Callable[[list[str], int, Path, dict[str, str]], Finished]
"""`lptune ARGUMENTS` on so many ranks in a folder, with further variables of the environment."""


def launch(arguments: list[str], ranks: int, folder: Path, extra: dict[str, str]) -> Finished:
    """Runs `lptune run` in new processes, as a user does."""
    flags = [f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return cold.run(*cold.LPTUNE, "run", *flags, *arguments, folder=folder, timeout_s=600, **extra)


class Inputs(NamedTuple):
    """What all runs have in common."""

    config: Path
    recipe: Path
    folder: Path
    launch: Launch


_NUM_ROWS = 8 * STEPS_PER_EPOCH  # write_config: global_batch_size is 8
# Recipe -> (writes rows for it, further keys of its config from the folder and the checkpoint).
_OF_RECIPE: dict[str, tuple[Callable[[Path, int], Path], Callable[[Path, Path], dict[str, Any]]]] = {
    "full_finetune": (write_rows, lambda folder, checkpoint: {}),
    "full_dpo": (write_preferences, lambda folder, checkpoint: {}),
    "full_kto": (write_labelled, lambda folder, checkpoint: {}),
    "continued_pretrain": (write_texts, lambda folder, checkpoint: {}),
    "distill": (
        write_rows,
        lambda folder, checkpoint: {"teacher": {"path": str(make_teacher(checkpoint, folder / "teacher"))}},
    ),
}
RECIPES = tuple(_OF_RECIPE)


def prepare(folder: Path, launch: Launch = launch, recipe: str = "full_finetune") -> Inputs:
    """A tiny checkpoint, a config of three epochs and a `recipe` that observes itself, in `folder`."""
    checkpoint = make_checkpoint(folder / "tiny")
    write, keys = _OF_RECIPE[recipe]
    sources = {"source": "rows.jsonl", "eval_source": "held_out.jsonl"}
    counts = {"source": _NUM_ROWS, "eval_source": 8}
    data = {key: str(write(folder / name, counts[key])) for key, name in sources.items()}
    config = write_config(
        folder / "tiny.yaml",
        checkpoint,
        folder / "unused",
        data=data | {"chat_template": "none", "seq_len": 128, "packing": False},
        optimizer={"lr": 1.0e-3},
        num_steps=NUM_STEPS,
        eval_every_steps=4,
        checkpoint={"every_steps": 3, "keep_last": 9},
        **keys(folder, checkpoint),
    )
    return Inputs(config, observe.write_recipe(folder / "observed.py", recipe), folder, launch)


KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a launcher: that was killed; of which a rank was, as a shell says it."""


def run_part(
    inputs: Inputs,
    output_dir: Path,
    ranks: int,
    *overrides: str,
    stop_after: int | None = None,
    by: signal.Signals = signal.SIGTERM,
) -> str | None:
    """The run, from where it stands to its end or to a signal on its last rank; what went wrong, or None."""
    extra = {} if stop_after is None else {observe.STOP_AFTER: str(stop_after), observe.STOP_BY: by.name}
    extra[observe.STOP_ON_RANK] = str(ranks - 1)
    arguments = [str(inputs.recipe), "--config", str(inputs.config), f"output_dir={output_dir}", *overrides]
    done = inputs.launch(arguments, ranks, inputs.folder, extra)
    wanted = (0,) if stop_after is None else KILLED if by is signal.SIGKILL else (143,)
    if done.returncode not in wanted:
        return (
            f"exit code {done.returncode} instead of {wanted[-1]}: {done.stdout[-500:]} {done.stderr[-1500:]}"
        )
    if (
        stop_after is not None
        and by is not signal.SIGKILL
        and (newest := step_of(list_checkpoints(output_dir / "checkpoints")[0])) != stop_after
    ):
        return f"stopped after step {newest} instead of {stop_after}"
    return None


class Outcome(NamedTuple):
    """What a finished run leaves."""

    steps: dict[int, dict[str, Any]]
    """Step -> what metrics.jsonl has of it, but for times and memory: loss, gradient norm, learning rate,
    held-out loss, and what the recipe adds to them."""
    batches: dict[int, list[str]]
    state: dict[str, str]
    """sha256 of each tensor of the last checkpoint."""

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [self.steps[step]["loss"] for step in range(1, NUM_STEPS + 1)]

    def differences(self, other: "Outcome") -> list[str]:
        """What is not the same to the bit."""
        wrong = []
        for step in sorted(self.steps.keys() | other.steps.keys()):
            ours, theirs = (
                {**each.steps.get(step, {}), "batches": each.batches.get(step)} for each in (self, other)
            )
            wrong += [
                f"step {step}: {key} {ours.get(key)!r} instead of {theirs.get(key)!r}"
                for key in sorted(ours.keys() | theirs.keys())
                if ours.get(key) != theirs.get(key)
            ]
        names = self.state.keys() | other.state.keys()
        changed = sorted(name for name in names if self.state.get(name) != other.state.get(name))
        if changed:
            wrong.append(f"{len(changed)} of {len(names)} tensors differ, {changed[0]} for one")
        return wrong


def outcome(output_dir: Path) -> Outcome:
    """Reads it; the metrics hold every step once. A step whose run was asked to stop before it evaluated has
    a second line, of its evaluation.
    """
    lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    numbers = [record["step"] for record in records if "loss" in record]
    assert numbers == list(range(1, NUM_STEPS + 1)), f"{output_dir}: metrics of steps {numbers}"
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        known = steps.setdefault(record["step"], {})
        again = known.keys() & record.keys() - {"step"} - _NOT_REPEATABLE
        assert not again, f"{output_dir}: step {record['step']} has {again} twice"
        known |= {key: record[key] for key in record.keys() - _NOT_REPEATABLE}
    newest = list_checkpoints(output_dir / "checkpoints")[0]
    assert step_of(newest) == NUM_STEPS, newest
    batches = observe.read_batches(output_dir)
    for first in range(1, NUM_STEPS, STEPS_PER_EPOCH):
        epoch = [row for step in range(first, first + STEPS_PER_EPOCH) for row in batches[step]]
        assert len(epoch) == len(set(epoch)), f"a row twice in the epoch that begins with step {first}"
    return Outcome(steps, batches, digests(stored_tensors(newest)))


def uninterrupted(inputs: Inputs, name: str, ranks: int, *overrides: str) -> Path:
    """The folder `name` of a finished run without an interruption. Made at the first call; later calls with
    this name get the same folder.
    """
    output_dir = inputs.folder / name
    if not (output_dir / "export.json").exists():
        shutil.rmtree(output_dir, ignore_errors=True)
        wrong = run_part(inputs, output_dir, ranks, *overrides)
        assert wrong is None, wrong
    return output_dir
