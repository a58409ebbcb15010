"""The launcher: starts the ranks of this machine by torchrun, and ends with the exit code of the cause.

torchrun, called as a function, starts and watches the processes. Three things are added here.

Exit codes and messages. torchrun sees exit codes only, and their time to a second. So every rank writes its
outcome (code, time, line, traceback) into a folder of the launcher (outcome.py), and a thread of the launcher
(watch.py) ends all ranks on all machines after the first failure. The launcher prints the cause once and
exits with the code of the cause.

Output. Rank 0 prints to the console, the other ranks to files (log.py), unless a flag of torchrun says
otherwise.

Signals (preemption.py). The launcher passes the first signal on to the ranks, which save and exit; torchrun
only sees that they end. A second signal after the grace interval ends everything at once.
"""

import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lptune.base.errors import UserError
from lptune.launch import flags, hangs, preemption, rendezvous
from lptune.launch.log import LOGS, move_logs
from lptune.launch.outcome import LAUNCHER, OUTCOMES, Outcome
from lptune.launch.watch import Watch, print_own


def torchrun(
    given: Sequence[str], arguments: Sequence[str], cfg: Any, recipe: Path, hang_timeout_s: float
) -> NoReturn:
    """Runs `lptune ARGUMENTS` on several ranks; exits with the code of the cause.

    given: flags of torchrun, which describe the ranks. cfg, recipe: what `arguments` name, for the machines
    to compare; logs of the other ranks go to the config's `output_dir`, if it has one. hang_timeout_s: see
    hangs.py; 0: never.
    """
    flags.quieten()
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    args = flags.parser().parse_args([*given, "--module", "lptune.cli.main", *arguments])
    point = flags.meeting_point(args, given, getattr(cfg, "output_dir", ""))
    signals = flags.check(args)
    if point.num_machines > 1 and (line := rendezvous.done(cfg)):
        print(line)
        sys.exit(0)
    args.signals_to_handle = ""  # signals are handled here, not by torchrun
    let_ranks_find_lptune()
    folder = Path(tempfile.mkdtemp(prefix="lptune-"))
    os.environ[OUTCOMES], os.environ[LAUNCHER] = str(folder), str(os.getpid())
    if not flags.keeps_logs_itself(args):
        os.environ[LOGS] = str(folder)
    os.environ[hangs.TIMEOUT] = f"{hang_timeout_s:g}"
    args.log_dir = args.log_dir or str(folder / "torchrun")
    _silence("torch.distributed")

    def leave(code: int) -> NoReturn:
        _tidy(folder, getattr(cfg, "output_dir", None), code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread may wait for a store, where Python's own exit aborts the process

    watch = Watch(folder, leave, hang_timeout_s)
    try:
        _listen(signals, watch, leave)
        digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
        told = rendezvous.tell(cfg, nnodes=point.num_machines, recipe=f"{recipe.name} ({digest})")
        met = rendezvous.meet(point, told)
        if (name := rendezvous.interface_of(met.local_address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        handler: Any = rendezvous.Handler(met)
        rendezvous_handler_registry.register(rendezvous.BACKEND, lambda _: handler)
        watch.begin(met)
        torch.distributed.run.run(args)
        code = watch.finish()
    except ChildFailedError as error:
        code = watch.conclude({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (torch.distributed.DistError, TimeoutError):
        code = watch.conclude({})  # the store's host is gone
    except UserError as error:
        code = error.exit_code
        print_own(Outcome(-1, code, 0, "", str(error)))
    except BaseException:
        _tidy(folder, getattr(cfg, "output_dir", None), 2)
        raise
    watch.stop()
    leave(code)


def let_ranks_find_lptune() -> None:
    """Adds the source folder to PYTHONPATH if lptune is not installed (`python -m lptune` in its folder)."""
    if not any(finder.find_spec("lptune", None) for finder in sys.meta_path):
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _tidy(folder: Path, output_dir: str | None, code: int) -> None:
    """Removes the launcher's folder. Logs with content are moved to the run's folder.

    After an error of the user (code 2) no run folder is made for the logs.
    """
    to = Path(output_dir).expanduser() if output_dir else None
    kept = None
    if code != 2 or (to is not None and (to / ".lock").is_file()):  # no folder if the run's has vanished
        kept = move_logs(folder, to / "logs" if to else None)
    if kept != folder:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"note: what the other ranks printed is in {folder}", file=sys.stderr)


def _listen(signals: Sequence[signal.Signals], watch: Watch, leave: Callable[[int], None]) -> None:
    """Passes signals on to the ranks. Other signals that torchrun would handle are treated as SIGTERM."""

    def first(number: signal.Signals) -> None:
        if not watch.pass_on(number):
            print(f"stopped by {number.name}: nothing new to save", file=sys.stderr, flush=True)
            leave(preemption.STOPPED)
        elif number == signal.SIGINT:
            preemption.announce_stop(number, "the ranks' work is")

    def again(number: signal.Signals) -> None:
        leave(128 + number)

    def as_sigterm(_: int, __: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # not raise_signal: this thread blocks the signal

    preemption.react(first, again)
    for number in set(signals) - preemption.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, as_sigterm)


def _silence(prefix: str) -> None:
    """Switches loggers off: torchrun would repeat the errors of the ranks as its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefix):
            logging.getLogger(name).setLevel(logging.CRITICAL)
