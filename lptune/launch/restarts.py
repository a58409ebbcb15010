"""Restarts: `lptune run --restarts N` starts a run again after a failure that need not happen again.

A killed rank, a lost machine, a hang and an error of a device end a launch on all its machines (watch.py,
hangs.py). The supervisor, a process without torch that has started the launcher as its child, then starts
the same command again. With `resume: auto` that goes on from the newest checkpoint, bit for bit, and on
another number of ranks, too. Each machine has a supervisor; the launchers meet again in their rendezvous. So
whatever a person does after a failure is all that happens here, and no state of the failed launch, its store,
devices or collectives, is left to be mended.

Three ends are final: a wrong input (2) and a divergence (3), which would only happen again, and a signal
(130, 143), by which somebody stops the run. So is a failure after N restarts in a row without a new
checkpoint.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lptune.base.errors import DivergedError, UserError
from lptune.base.files import LongLineError, lines_of, object_of
from lptune.base.step_folders import list_checkpoints, step_of
from lptune.launch import preemption
from lptune.launch.bound import Runner
from lptune.launch.outcome import LEAVING

SUPERVISED = "LPTUNE_SUPERVISED"
"""In the environment of a launcher that is started again after a failure."""
_FINAL = {*LEAVING, UserError.exit_code, DivergedError.exit_code}
_MAX_WAIT_S = 60.0


def supervise(arguments: Sequence[str], most: int, output_dir: str | None) -> int:
    """Runs `lptune ARGUMENTS` until it ends with a final exit code, which is the result, or with another one
    after `most` restarts in a row without a new checkpoint in output_dir (None: the command writes none).
    """
    run = None if output_dir is None else Path(output_dir).expanduser()
    runner, used, reached = Runner(), 0, _newest(run)
    while True:
        code = runner.run(arguments, {SUPERVISED: "1"})
        if code in _FINAL or runner.stopped.is_set():
            return code
        now = _newest(run)
        used, reached = 0 if now > reached else used, now
        if used == most:
            new = " without a new checkpoint" if run is not None else ""
            _say(f"exit code {code}: not started again after {used} restarts{new}")
            return code
        used += 1
        wait_s = min(2.0 ** (used - 1), _MAX_WAIT_S)  # for a device or a neighbour to come back
        _say(f"exit code {code}: restart {used} of {most} in {wait_s:.0f} s{_told(run, now)}")
        if runner.stopped.wait(wait_s):
            _say("stopped by a signal; the same command continues the run")
            return preemption.STOPPED


def _say(line: str) -> None:
    print(f"restarts: {line}", file=sys.stderr, flush=True)


def _newest(run: Path | None) -> int:
    """The step of the newest checkpoint; -1 without one."""
    folders = [] if run is None else [run / "checkpoints", run / "parts"]
    return max((step_of(path) for folder in folders for path in list_checkpoints(folder)), default=-1)


def _told(run: Path | None, step: int) -> str:
    """What the restart continues, and how much was lost. step: of the newest checkpoint; -1 without one."""
    if run is None:
        return ""
    last = 0
    try:
        for line in lines_of(run / "metrics.jsonl"):
            found = (object_of(line) or {}).get("step")
            last = found if isinstance(found, int) else last
    except (OSError, UserError, LongLineError):
        pass  # the run itself will say so
    lost = last - max(step, 0)
    begins = f"from step {step}" if step >= 0 else "from the beginning: no checkpoint yet"
    return f", {begins}" + (f"; {lost} steps are done again" if lost > 0 else "")
