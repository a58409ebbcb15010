"""Moments, streams, variables and modules: what goes on around a command while it runs."""

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from lptune.base.errors import UserError
from lptune.checkpoint.manifest import list_checkpoints, verify
from tests.faults.adversary import phases
from tests.faults.adversary.child import NO_READER, Streams
from tests.faults.adversary.judge import EITHER, OWN, REFUSED, Case
from tests.faults.adversary.phases import PHASES, go_on, has_come
from tests.faults.adversary.place import Finished, Place

_SAID = "said"
_AFTER_TRAINING = ("before the export", "after the export")


def cases(rng: random.Random) -> Iterator[Case]:
    yield from _signals_to_runs()
    yield from _signals_to_others()
    yield from _vanishing()
    yield from _two_runs()
    yield from _launchers(rng)
    yield from _streams()
    yield from _ascii()


def _at(phase: str, act: Callable[[Place, int], object]) -> Callable[[Place, int], None]:
    """Waits until the run has come to the phase, acts, and lets it go on."""

    def meanwhile(place: Place, pid: int) -> None:
        if has_come(place.root / _SAID, pid):
            act(place, pid)
        go_on(place.root / _SAID)

    return meanwhile


def _instrumented(place: Place, *overrides: str) -> list[str]:
    phases.write_recipe(place.folder / "mine.py")
    return place.job(*overrides, recipe="mine.py")


# ---- signals

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _continues(place: Place, done: Finished) -> str:
    """After a stop the next run comes to its end, with each step once."""
    try:
        for path in list_checkpoints(place.run / "checkpoints"):
            verify(path)
    except UserError as error:
        return f"a checkpoint is bad: {error}"
    again = place.lptune(place.job())
    if again.code != 0:
        return f"the next run ends with {again.code}: {again.stderr!r}"
    num_lines = len((place.run / "metrics.jsonl").read_text().splitlines())
    return "" if num_lines == 2 else f"{num_lines} steps in metrics.jsonl"


def _signals_to_runs() -> Iterator[Case]:
    for phase, number, num_times in itertools.product(PHASES, _SIGNALS, (1, 2)):

        def send(place: Place, pid: int, number: signal.Signals = number, num_times: int = num_times) -> None:
            for _ in range(num_times):
                with suppress(ProcessLookupError):  # the first signal may have ended it
                    os.kill(pid, number)
                time.sleep(0.05)

        is_late = phase in _AFTER_TRAINING
        yield Case(
            subject="signals to runs",
            name=f"{number.name} x {num_times}, {phase}",
            prepare=lambda place: _instrumented(place, "checkpoint.every_steps=1"),
            codes=frozenset({0, 143} if is_late else {143}),
            environment={phases.PHASE: phase},
            meanwhile=_at(phase, send),
            then=_continues,
        )


_COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", "run"],
    "export": ["export", "run", "exported"],
    "new-checkpoint": ["new-checkpoint", "llama3_2/tiny", "new"],
    "plan": ["plan", "full_finetune", "--config", "job.yaml"],
    "validate": ["validate", "job.yaml"],
}


def _signals_to_others() -> Iterator[Case]:
    delays_s = (0.0, 0.01, 0.03, 0.06, 0.1)
    for command, number, delay_s in itertools.product(_COMMANDS, _SIGNALS[:3], delays_s):

        def send(place: Place, pid: int, number: signal.Signals = number, delay_s: float = delay_s) -> None:
            if has_come(place.root / _SAID, pid, to="started"):
                time.sleep(delay_s)
                with suppress(ProcessLookupError):  # a short command may have ended
                    os.kill(pid, number)

        def prepare(place: Place, command: str = command) -> list[str]:
            place.a_finished_run()
            return _COMMANDS[command]

        codes = {signal.SIGINT: {0, 130}, signal.SIGTERM: {0, 143, -15}, signal.SIGHUP: {0, 129, 143, -1}}
        yield Case(
            subject="signals to others",
            name=f"{number.name} to {command} after {delay_s} s",
            prepare=prepare,
            codes=frozenset(codes[number]),
            meanwhile=send,
        )


# ---- the world moves

_MOVES: dict[str, Callable[[Place], object]] = {
    "is removed": lambda place: shutil.rmtree(place.run),
    "is renamed": lambda place: place.run.rename(place.folder / "away"),
    "is renamed with its parent": lambda place: place.folder.rename(place.root / "away"),
    "is replaced": lambda place: (place.run.rename(place.folder / "away"), place.run.mkdir()),
    "is replaced by a file": lambda place: (place.run.rename(place.folder / "away"), place.run.touch()),
    "is replaced by a link": lambda place: (
        place.run.rename(place.folder / "away"),
        place.run.symlink_to(place.victim),
    ),
    "is replaced by a pipe": lambda place: (place.run.rename(place.folder / "away"), os.mkfifo(place.run)),
}


def _nothing_there(place: Place, done: Finished) -> str:
    run = place.run
    if run.is_symlink() or not run.is_dir():
        return ""
    return f"{os.listdir(run)} in a folder of another" if os.listdir(run) else ""


def _vanishing() -> Iterator[Case]:
    for phase, move in itertools.product([name for name in PHASES if name != "after the export"], _MOVES):

        def prepare(place: Place) -> list[str]:
            arguments = _instrumented(place, "num_steps=4", f"output_dir={place.a_finished_run()}")
            # The parent's other files are not the run's matter.
            arguments[1] = str(shutil.move(place.folder / "mine.py", place.root / "mine.py"))
            return arguments

        yield Case(
            subject="vanishing",
            name=f"the folder {move} {phase}",
            prepare=prepare,
            codes=REFUSED,
            writes_nothing=False,
            may_change=("work/*", "work"),
            environment={phases.PHASE: phase},
            meanwhile=_at(phase, lambda place, pid, move=move: _MOVES[move](place)),
            then=_nothing_there,
        )


# ---- two at once

_SECOND: dict[str, Callable[[Place], list[str]]] = {
    "the same run": lambda place: place.job("num_steps=3"),
    "another run": lambda place: place.job("num_steps=3", "seed=1", "resume=none"),
    "verify": lambda place: ["verify", "run"],
    "export": lambda place: ["export", "run", "exported"],
    "export into the run": lambda place: ["export", "run", "run/export"],
}


def _two_runs() -> Iterator[Case]:
    for phase, second, is_new in itertools.product(PHASES, _SECOND, (True, False)):
        seen: dict[str, Finished] = {}

        def prepare(place: Place, is_new: bool = is_new) -> list[str]:
            if not is_new:
                place.a_finished_run()
            return _instrumented(place, "num_steps=3")

        def act(place: Place, pid: int, second: str = second, seen: dict[str, Finished] = seen) -> None:
            seen["second"] = place.lptune(_SECOND[second](place), {phases.PHASE: ""})

        def then(place: Place, done: Finished, second: str = second, seen: dict[str, Finished] = seen) -> str:
            other = seen.get("second")
            if other is None:
                return "the phase did not come"
            if other.code not in (0, 2) or b"Traceback" in (other.stderr or b""):
                return f"the second ends with {other.code}: {other.stderr!r}"
            if second.endswith("run") and second != "export into the run" and {other.code, done.code} == {0}:
                return "both ran"
            if other.code and done.code:
                return "none of them came to its end"
            checked = place.lptune(["verify", "run"])
            return "" if checked.code == 0 else f"the run does not verify: {checked.stdout!r}"

        yield Case(
            subject="two at once",
            name=f"{second} {phase} of {'a new' if is_new else 'a continued'} run",
            prepare=prepare,
            codes=EITHER,
            writes_nothing=False,
            may_change=OWN,
            environment={phases.PHASE: phase},
            meanwhile=_at(phase, act),
            then=then,
        )


# ---- what launchers leave

_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "LPTUNE_LOGS", "LPTUNE_OUTCOMES", "LPTUNE_LAUNCHER_PID", "LPTUNE_KERNELS", "PET_NPROC_PER_NODE",
    "PET_NNODES",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "HOME", "CXX", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
_VALUES = ("", "0", "2", "-1", "abc", "\u00b2", "/proc/nowhere")
_LEFT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
"MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False",
         "LPTUNE_LOGS": "/proc/nowhere", "LPTUNE_OUTCOMES": "/proc/nowhere",
         "LPTUNE_LAUNCHER_PID": "1"}  # fmt: skip


def _launchers(rng: random.Random) -> Iterator[Case]:
    found = [{name: value} for name, value in itertools.product(_VARIABLES, _VALUES)]
    found += [
        {name: _LEFT[name] for name in sorted(rng.sample(sorted(_LEFT), rng.randrange(2, len(_LEFT))))}
        for _ in range(60)
    ]
    for variables in {str(found): found for found in found}.values():
        yield Case(
            subject="launchers' leftovers",
            name=" ".join(f"{name}={value}" for name, value in variables.items()),
            prepare=lambda place: place.job(),
            codes=EITHER,
            environment=variables,
        )


# ---- streams

_LOST = {"open": os.devnull, "full": "/dev/full", "without a reader": NO_READER}
_PRINTING: dict[str, list[str]] = {
    **_COMMANDS,
    "run": ["run", "full_finetune", "--config", "job.yaml", "output_dir=other"],
    "ls": ["ls"],
    "help": ["--help"],
    "cat": ["cat", "quickstart"],
    "cp": ["cp", "quickstart", "mine.yaml"],
    "an error": ["run", "full_finetune", "--config", "job.yaml", "model.path=none"],
    "a usage error": ["verify"],
    "an unknown command": ["trian"],
}


def _streams() -> Iterator[Case]:
    lost = [
        Streams(os.devnull, _LOST[stdout], _LOST[stderr])
        for stdout, stderr in itertools.product(_LOST, _LOST)
    ]
    names = {stream: name for name, stream in _LOST.items()}
    for command, streams in itertools.product(_PRINTING, lost):
        wrong = command in ("an error", "a usage error", "an unknown command")
        fails = streams.stdout != os.devnull
        codes = {2, 141} if wrong else {0, 2, 141} if fails else {0}

        def prepare(place: Place, command: str = command) -> list[str]:
            place.a_finished_run()
            return _PRINTING[command]

        yield Case(
            subject="streams",
            name=f"{command}, stdout {names[streams.stdout]}, stderr {names[streams.stderr]}",
            prepare=prepare,
            codes=frozenset(codes - {2, 141} if command == "run" else codes),
            streams=streams,
        )


_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


def _ascii() -> Iterator[Case]:
    commands: dict[str, list[str]] = {
        "ls": ["ls"],
        "cat": ["cat", "ä.yaml"],
        "validate": ["validate", "ä.yaml"],
        "an unknown key": ["validate", "job.yaml", "ä=1"],
        "verify": ["verify", "ä"],
        "run": ["run", "full_finetune", "--config", "ä.yaml"],
    }
    for command, arguments in commands.items():

        def prepare(place: Place, arguments: list[str] = arguments) -> list[str]:
            place.model.rename(place.folder / "ä")
            place.write_config(place.folder / "ä.yaml", model={"path": "ä"}, output_dir="lauf-ß")
            return arguments

        yield Case(
            subject="ASCII terminal",
            name=command,
            prepare=prepare,
            codes=REFUSED if command == "an unknown key" else EITHER,
            environment=_ASCII,
            is_cold=True,
        )
