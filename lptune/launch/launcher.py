"""The launcher: how ranks are started, how a rank ends, and how the launcher ends.

torchrun, called as a function, starts and watches the processes. Four things are added here.

Exit codes and messages. torchrun sees exit codes only, and their time to a second. So every rank writes its
outcome (code, time, line, traceback) into a folder of the launcher (outcome.py), and a thread of the launcher
(watch.py) ends all ranks on all machines after the first failure. The launcher prints the cause once and
exits with the code of the cause.

Output. Rank 0 prints to the console, the other ranks to files (lptune/launch/log.py), unless a flag of
torchrun says otherwise.

Death of the launcher. A rank must not go on writing after its launcher was killed: the kernel then kills the
rank, too (PR_SET_PDEATHSIG).

Signals (lptune/launch/preemption.py). The launcher passes the first signal on to the ranks, which save and
exit; torchrun only sees that they end. A second signal after the grace interval ends everything at once.
"""

import copy
import ctypes
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lptune import launch
from lptune.config import UserError, closest
from lptune.launch import preemption
from lptune.launch.watch import Watch

if TYPE_CHECKING:
    import argparse

_PEER_GRACE_S = 1.0
_OF_A_RANK = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def stay_on_loopback() -> None:
    """Keeps gloo on the loopback device: on one machine, no port needs to be open to the network."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# ---- in a rank


def is_rank() -> bool:
    """Whether this process was started by torchrun (or by a cluster that sets the same variables).

    Raises UserError for variables with values that no launcher sets. In a process that is not a rank, the
    variables that only matter to a rank are removed from the environment.
    """
    required = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not required:
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
        return False
    given = required | {name: os.environ[name] for name in _OF_A_RANK if name in os.environ}
    odd = {name: value for name, value in given.items() if not re.fullmatch(r"\d{1,9}", value)}
    if odd or len(required) < 2:
        found = ", ".join(f"{name}={value}" for name, value in (odd or required).items())
        raise UserError(
            f"run: {found} in the environment: a launcher sets RANK, WORLD_SIZE and the like to numbers; "
            "unset what is left of one"
        )
    return True


def as_rank(body: Callable[[], object]) -> None:
    """Runs `body` as one rank of several, writes the outcome and exits with its code."""
    _die_with_launcher()
    if os.path.isdir(os.environ.get(launch.OUTCOMES, "")):
        launch.redirect_output()
        launch.announce()
    error: BaseException | None = None
    try:
        body()
    except BaseException as raised:
        error = raised
    outcome = launch.outcome_of(error)
    if error is not None and not launch.hold(error) and not launch.write_outcome(outcome):
        _print_without_launcher(outcome)
    launch.write_outcome(outcome)
    sys.exit(outcome.code)


def _print_without_launcher(outcome: launch.Outcome) -> None:
    """Prints the error of this rank, since plain torchrun does not."""
    if outcome.traceback:
        print(f"rank {outcome.rank}:\n{outcome.traceback}", end="", file=sys.stderr, flush=True)
    elif outcome.line:
        who = "" if outcome.rank == 0 else f"rank {outcome.rank}: "
        print(f"error: {who}{outcome.line}", file=sys.stderr, flush=True)
        if outcome.rank != 0:
            # Most errors occur on every rank. The first exit ends the other ranks, so rank 0 gets time to
            # speak.
            time.sleep(_PEER_GRACE_S)


def _die_with_launcher() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The launcher may have died before that call.
    if os.environ.get(launch.LAUNCHER, str(os.getppid())) != str(os.getppid()):
        with suppress(OSError):
            line = (
                f"error: the launcher that started this rank is gone; unset {launch.LAUNCHER} if none did\n"
            )
            os.write(2, line.encode())
        os._exit(2)


# ---- in the launcher


def split_flags(arguments: Sequence[str], own_flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """`(flags, rest)`: torchrun's flags with their values, and all from the first positional argument on."""
    namespace, unknown = _parser().parse_known_args([*arguments, "no-recipe"])
    flags = [argument for argument in unknown if argument.startswith("-")]
    if flags:
        name = flags[0].partition("=")[0]
        known = re.findall(r"--[a-z][a-z-]+", _parser().format_help())
        raise UserError(
            f"run: no such option: {name}{closest(name, [*known, *own_flags])}; see `lptune run --help`"
        )
    rest = [namespace.training_script, *namespace.training_script_args][:-1]
    return list(arguments[: len(arguments) - len(rest)]), rest


def torchrun(flags: Sequence[str], arguments: Sequence[str], output_dir: str | None) -> NoReturn:
    """Runs `lptune ARGUMENTS` on the ranks that `flags` describe; exits with the code of the cause.

    output_dir: where the logs of the other ranks go.
    """
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    args = _parser().parse_args([*flags, "--module", "lptune.cli.main", *arguments])
    rendezvous = _choose_rendezvous(args, flags)
    signals = _check(args)
    args.signals_to_handle = ""  # signals are handled here, not by torchrun
    _let_ranks_find_lptune()
    folder = Path(tempfile.mkdtemp(prefix="lptune-"))
    os.environ[launch.OUTCOMES], os.environ[launch.LAUNCHER] = str(folder), str(os.getpid())
    if not _keeps_logs_itself(args):
        os.environ[launch.LOGS] = str(folder)
    args.log_dir = args.log_dir or str(folder / "torchrun")
    _silence("torch.distributed")

    def leave(code: int) -> NoReturn:
        _tidy(folder, output_dir, code)
        os._exit(code)

    watch = Watch(folder, rendezvous, leave)
    code = 2
    try:
        watch.start()
        _listen(signals, watch, leave)
        torch.distributed.run.run(args)
        code = watch.finish()
    except ChildFailedError as error:
        code = watch.conclude({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (RendezvousError, torch.distributed.DistError, TimeoutError) as error:
        if not watch.has_ranks:
            raise UserError(_about_rendezvous(error, rendezvous, args)) from None
        code = watch.conclude({})  # the store's host is gone
    finally:
        watch.stop()
        _tidy(folder, output_dir, code)
    sys.exit(code)


def _let_ranks_find_lptune() -> None:
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
        kept = launch.move_logs(folder, to / "logs" if to else None)
    if kept != folder:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"note: what the other ranks printed is in {folder}", file=sys.stderr)


def _about_rendezvous(error: Exception, rendezvous: str, args: "argparse.Namespace") -> str:
    first_line = (str(error).splitlines() or [""])[0].removesuffix(" See inner exception for details.")
    if not rendezvous:
        return f"run: torchrun: {first_line}"
    reason = first_line or "not all machines came"
    return (
        f"run: rendezvous at {rendezvous}: {reason}; start the same command on "
        f"all {args.nnodes} machines, with a host that they all reach and a port that is free there"
    )


def _parser() -> "argparse.ArgumentParser":
    """torchrun's parser; it raises UserError where the original prints and exits."""
    from torch.distributed.run import get_args_parser

    def error(message: str) -> NoReturn:
        raise UserError(f"run: torchrun: {message}; see `torchrun --help`")

    parser = get_args_parser()
    parser.allow_abbrev = False
    parser.error = error  # type: ignore[method-assign]
    return parser


def _choose_rendezvous(args: "argparse.Namespace", flags: Sequence[str]) -> str:
    """Fills in the rendezvous flags; returns the address of the rendezvous, empty for one machine."""
    smallest, _, largest = str(args.nnodes).partition(":")
    if largest not in ("", smallest):
        raise UserError(
            f"run: --nnodes: {args.nnodes}: a run does not change its size while it runs; give one number, "
            "and start it again with another (resume: auto continues it)"
        )
    if args.max_restarts:
        raise UserError(
            "run: --max-restarts: ranks are not restarted within a launch; run the same command again "
            "(resume: auto continues it)"
        )
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    here = ("--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port")
    if smallest == "1":
        if not given.intersection(here) and not any(name.startswith("PET_") for name in os.environ):
            args.standalone = True
            _stay_on_loopback(args)
        return ""
    if args.standalone:
        raise UserError(f"run: --standalone is for one machine, --nnodes is {args.nnodes}")
    if not args.rdzv_endpoint and (args.rdzv_backend != "static" or not _is_set("--master-addr", given)):
        raise UserError(
            f"run: --nnodes {args.nnodes}: the machines need a place to meet; give all of them the same "
            "--rdzv-endpoint HOST:PORT, the name of one of them and a port that is free there"
        )
    if args.rdzv_endpoint and not _is_set("--rdzv-backend", given) and not _is_set("--node-rank", given):
        args.rdzv_backend = "c10d"  # torchrun's own default wants the machines numbered
    address = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    if re.match(r"localhost\b|127\.|\[?::1\b", address):  # several launchers on one machine
        _stay_on_loopback(args)
    return str(address)


def _is_set(flag: str, given: set[str]) -> bool:
    return flag in given or f"PET_{flag[2:].replace('-', '_').upper()}" in os.environ


def _stay_on_loopback(args: "argparse.Namespace") -> None:
    args.local_addr = args.local_addr or "127.0.0.1"
    stay_on_loopback()


def _keeps_logs_itself(args: "argparse.Namespace") -> bool:
    """Whether a flag tells torchrun what to do with the output of the ranks."""
    defaults = _parser()
    names = ("log_dir", "redirects", "tee", "local_ranks_filter")
    return any(getattr(args, name) != defaults.get_default(name) for name in names)


def _check(args: "argparse.Namespace") -> list[signal.Signals]:
    """The signals to handle. Raises UserError, before anything is touched, for flags that cannot work."""
    import torch
    import torch.distributed.run

    if args.no_python or args.run_path:
        raise UserError("run: --no-python and --run-path do not go with a recipe")
    if args.nproc_per_node == "gpu" and not torch.cuda.is_available():
        raise UserError("run: --nproc-per-node: gpu, but this machine has no CUDA device")
    signals = []
    for name in args.signals_to_handle.split(","):
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals):
            raise UserError(f"run: --signals-to-handle: no such signal: {name}")
        signals.append(number)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    looked_at = copy.copy(args)
    looked_at.log_dir = args.log_dir or os.devnull  # otherwise torchrun leaves a temporary folder
    try:
        torch.distributed.run.config_from_args(looked_at)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UserError(f"run: torchrun: {error}") from None
    return signals


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
