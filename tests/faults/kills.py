"""SIGKILL at random moments of saving: what was published verifies and holds what it must, nothing is lost.

    python -m tests.faults.kills --trials 1000 --ranks 1
    python -m tests.faults.kills --trials 100 --ranks 2

A trial forks a process (or two ranks) from this one, which has imported torch already. It does what a run
does: it finds the newest checkpoint that verifies, loads it, compares every element, cleans the folder, and
then trains and saves over and over, now in the background, now not; it reports through a pipe every step that
it knows to be published. It dies in one of three ways: at a random moment; at a random boundary between two
calls that change the file system; or a random moment after such a boundary (a save waits for the disk most of
its time, so that the first way alone would rarely hit a rename). The folder stays for the next trial,
sometimes uncleaned, so that leftovers of several kills meet.
"""

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lptune import checkpoint, distributed
from lptune.base.step_folders import list_checkpoints, step_of
from lptune.checkpoint.run_folder import open_run_folder
from lptune.config import DataConfig, FinetuneConfig, ModelConfig
from tests.faults.state import State, many_parts, table
from tests.helpers.launch import free_port, rank_environment

_MAX_BOUNDARIES = 100  # of some five saves
_MAX_DELAY_S = 0.12
# Not the files of a checkpoint that goes, one by one: half of all kills would hit retention.
_CHANGES = {"os.rename", "os.mkdir", "os.chmod", "shutil.rmtree"}
_TRIALS_PER_FOLDER = 40
_GIVE_UP_S = 60.0

PHASES = {
    "between saves": "no unfinished folder",
    "folder made": "an empty .tmp-step-N",
    "tensors": "some files of tensors, or parts of them",
    "hashes": "as many files of tensors as a checkpoint has, no rank's entry yet",
    "ranks agree": "the entry of a rank",
    "state": "state.json",
    "manifest": "manifest.json, the folder not renamed yet",
    "retention": "a checkpoint half removed",
}
"""Where a kill hit, by what it left."""


class Plan(NamedTuple):
    """One trial."""

    keep_last: int
    keep_every: int
    clean: bool
    how: str
    """moment | boundary | after a boundary."""
    boundary: int
    delay_s: float
    victims: tuple[int, ...]
    """Ranks that are killed."""
    parts: bool


class Result:
    """What a series of trials has seen."""

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.num_trials = self.num_verified = self.num_reported = self.num_resumed = 0
        self.unloadable: list[str] = []
        self.lost: list[str] = []
        self.broken: list[str] = []
        """Trials whose processes failed by themselves."""

    @property
    def num_failures(self) -> int:
        """0 is what it must be."""
        return len(self.unloadable) + len(self.lost) + len(self.broken)

    def report(self) -> str:
        """The table."""
        rows = [(phase, PHASES[phase], self.phases[phase]) for phase in PHASES]
        counts = (
            f"{self.num_trials} kills; {self.num_verified} checkpoints verified, loaded, compared bitwise, "
            f"{self.num_resumed} resumes, {self.num_reported} published saves reported: "
            f"{len(self.unloadable)} unloadable or with a wrong hash, {len(self.lost)} lost, "
            f"{len(self.broken)} processes that failed by themselves"
        )
        lines = [table(("killed in", "found in the folder", "kills"), rows), counts]
        return "\n".join([*lines, *self.unloadable, *self.lost, *self.broken])


def _plan(rng: random.Random, ranks: int, keep_every: int) -> Plan:
    victims = tuple(range(ranks)) if ranks == 1 or rng.random() < 0.5 else (rng.randrange(ranks),)
    return Plan(
        keep_last=rng.choice((1, 2)),
        keep_every=keep_every,
        clean=rng.random() < 0.6,
        how=rng.choice(("moment", "boundary", "after a boundary")),
        boundary=rng.randrange(1, _MAX_BOUNDARIES),
        delay_s=rng.random() * _MAX_DELAY_S,
        victims=victims,
        parts=rng.random() < 0.5,
    )


# ---- in the process that is killed


def _train(folder: Path, plan: Plan, rank: int, pipe: int) -> None:
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"), data=DataConfig(source="builtin"), output_dir=str(folder)
    )
    with (
        distributed.session("cpu") as world,
        open_run_folder(cfg, world) as run,
    ):
        state = State(world)
        saved = checkpoint.find_checkpoint(run.checkpoints, "auto", world, _refuse)
        if saved is not None:
            state.load(saved)
        if plan.clean or saved is None:
            run.create(saved, lambda line: None)
        keys = {"keep_last": plan.keep_last, "keep_every": plan.keep_every}
        writer = state.writer(run.checkpoints, world, **keys)
        if rank == plan.victims[0]:
            _watch_boundaries(plan, pipe)
            os.write(pipe, b"ready\n")
        # One save in the background, one at once, so that each kind follows the other.
        for number in range(1_000_000):
            pending, step, wait = state.step, state.advance(), number % 2 == 1
            state.save(writer, wait=wait)
            if wait and rank == 0:  # then the one before is published as well
                os.write(pipe, f"{pending}\n{step}\n".encode())


def _refuse(line: str) -> None:
    raise AssertionError(line)  # nothing that a kill leaves may look like a damaged checkpoint


def _watch_boundaries(plan: Plan, pipe: int) -> None:
    """Dies before the plan's call that changes the file system, or tells the parent that it is reached."""
    if plan.how == "moment":
        return
    left = plan.boundary
    alone = plan.how == "boundary"

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open":
            flags = arguments[2]
            if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event not in _CHANGES:
            return
        left -= 1
        if left == 0:
            if alone:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(pipe, b"reached\n")

    sys.addaudithook(hook)


def _child(folder: Path, plan: Plan, rank: int, ranks: int, port: int, pipe: int) -> None:
    try:
        if ranks > 1:
            os.environ |= rank_environment(rank, ranks, port)
        if plan.parts:
            with many_parts():
                _train(folder, plan, rank, pipe)
        else:
            _train(folder, plan, rank, pipe)
    except BaseException as error:
        if ranks == 1:
            os.write(pipe, f"error {type(error).__name__}: {error}\n".replace("\n", " ").encode() + b"\n")
    finally:
        os._exit(1)  # nothing of the parent is flushed or cleaned up twice


# ---- in the process that judges


def _run(folder: Path, plan: Plan, ranks: int) -> tuple[list[int], str]:
    """Starts a trial's processes and kills them; the steps reported as published, and what went wrong."""
    reader, pipe = os.pipe()
    port = free_port() if ranks > 1 else 0
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(folder, plan, rank, ranks, port, pipe)
        pids.append(pid)
    os.close(pipe)
    text, deadline = b"", time.monotonic() + _GIVE_UP_S
    kill_at: float | None = None
    while (now := time.monotonic()) < deadline:
        if kill_at is not None and now >= kill_at:
            break
        until = deadline if kill_at is None else kill_at
        if select.select([reader], [], [], max(0.0, until - now))[0]:
            new = os.read(reader, 65536)
            if not new:
                break  # it has died at its boundary
            text += new
            aim = b"ready\n" if plan.how == "moment" else b"reached\n"
            if kill_at is None and aim in text and plan.how != "boundary":
                scale = 1.0 if plan.how == "moment" else 0.05
                kill_at = time.monotonic() + plan.delay_s * scale
            if plan.how == "boundary" and ranks > 1 and b"ready\n" in text and kill_at is None:
                kill_at = time.monotonic() + 20 * _MAX_DELAY_S  # its peer keeps the pipe open
    for rank in plan.victims:
        os.kill(pids[rank], signal.SIGKILL)
    if len(plan.victims) < ranks:  # the launcher ends the others, but not at once
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while new := os.read(reader, 65536):
        text += new
    os.close(reader)
    lines = text.decode().splitlines()
    wrong = [line for line in lines if line.startswith("error")]
    if b"ready\n" not in text:
        wrong.append("never came to saving")
    return [int(line) for line in lines if line.isdigit()], "; ".join(wrong)


def _unfinished(checkpoints: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in checkpoints.glob(".tmp-*")}


def _phase(checkpoints: Path, left_before: dict[Path, int]) -> str:
    new = [path for path, time_ns in _unfinished(checkpoints).items() if left_before.get(path) != time_ns]
    if any(path.name.startswith(".tmp-removed-") for path in new):
        return "retention"
    if not new:
        return "between saves"
    names = {path.name for path in new[-1].iterdir()}
    for name, phase in (("manifest.json", "manifest"), ("state.json", "state")):
        if name in names or f".tmp-{name}" in names:
            return phase
    if any("rank-" in name for name in names):
        return "ranks agree"
    if not names:
        return "folder made"
    kinds = {name.partition("-")[0] for name in names if name.endswith(".safetensors")}
    return "hashes" if kinds == {"model", "optimizer", "replicated"} else "tensors"


def _judge(folder: Path, plan: Plan, before: set[int], reported: Sequence[int], result: Result) -> set[int]:
    """Checks everything published; returns its steps."""
    checkpoints = folder / "checkpoints"
    found = {step_of(path): path for path in list_checkpoints(checkpoints)}
    for path in found.values():
        try:
            State().load(checkpoint.verify(path))
        except Exception as error:  # any: each is a checkpoint that cannot be resumed from
            result.unloadable.append(f"{path.name}: {error}")
        result.num_verified += 1
    for step in before | set(reported):
        num_newer = sum(other > step for other in found)
        stays = plan.keep_every and step % plan.keep_every == 0
        if step not in found and (stays or num_newer < plan.keep_last):
            result.lost.append(f"step {step} was published and is gone, {sorted(found)} are there; {plan}")
    return set(found)


def kills(trials: int, ranks: int, seed: int, within: Path) -> Result:
    """`trials` kills of a run on `ranks` ranks."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    result = Result()
    published = set[int]()
    folder = within
    for trial in range(trials):
        if trial % _TRIALS_PER_FOLDER == 0:
            folder, published = within / f"run-{trial}", set()
            keep_every = rng.choice((0, 7))
        plan = _plan(rng, ranks, keep_every)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        left_before = _unfinished(folder / "checkpoints")
        reported, wrong = _run(folder, plan, ranks)
        if wrong:
            result.broken.append(f"trial {trial}: {wrong}; {plan}")
        result.phases[_phase(folder / "checkpoints", left_before)] += 1
        result.num_trials += 1
        result.num_reported += len(reported)
        result.num_resumed += bool(published)
        published = _judge(folder, plan, published, reported, result)
        if trial % _TRIALS_PER_FOLDER == _TRIALS_PER_FOLDER - 1:
            shutil.rmtree(folder)
    return result


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lptune-kills-") as within:
        result = kills(args.trials, args.ranks, args.seed, Path(within))
    print(result.report())
    print(f"{args.ranks} ranks, seed {args.seed}, {time.monotonic() - started:.0f} s")
    sys.exit(bool(result.num_failures))


if __name__ == "__main__":
    main()
