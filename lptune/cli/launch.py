"""Ranks: how several are started, how each of them ends, and what the launcher makes of it.

torchrun starts and watches the processes; used as a function it leaves three things to do.

Exit codes and messages. torchrun knows exit codes only, with a resolution of one second, and a rank that
fails takes its peers down with connection errors of their own. So every rank writes its outcome (code, time,
line) into a folder of the launcher before it exits, and one that fails unexpectedly first looks whether a
peer had a reason of its own. The earliest outcome is therefore the cause: its code becomes the launcher's,
and a user's mistake is printed once, by the launcher, however many ranks made it.

Death. A killed launcher must leave no rank behind that goes on writing: the kernel kills it
(PR_SET_PDEATHSIG).

Signals. The first SIGTERM or SIGINT is forwarded to the ranks, which save and leave. It often arrives twice
(a group signal, an impatient hand); a repetition within the grace interval is ignored, a later one ends
everything at once.
"""

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from lptune.config import DivergedError, UserError, closest

if TYPE_CHECKING:
    import argparse

_OUTCOMES = "LPTUNE_OUTCOMES"  # folder for outcomes, from the launcher to its ranks
_LAUNCHER = "LPTUNE_LAUNCHER_PID"
_REPEAT_GRACE_S = 5.0
_PEER_GRACE_S = 1.0
_SAVE_GRACE_S = (
    "300"  # torchrun kills ranks that take longer to leave after a signal; its own 30 s are short for a save
)


class Outcome(NamedTuple):
    """How a rank ended."""

    rank: int
    code: int
    time_ns: int
    line: str  # message of a UserError or DivergedError; else empty


def stay_on_loopback() -> None:
    """Keep gloo on the loopback device: on one machine no port needs to face the network."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# ---- in a rank


def is_rank() -> bool:
    """Was this process started by torchrun (or by a cluster that sets the same variables)?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def as_rank(body: Callable[[], object]) -> None:
    """Run `body` as one rank of several; exit with its code, its outcome written down."""
    rank = int(os.environ["RANK"])
    _die_with_launcher()
    line = ""
    try:
        body()
        return
    except (UserError, DivergedError) as error:
        code, line = error.exit_code, str(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except Exception:
        code = 1
        # A peer that leaves closes its connections, and does so moments before its outcome stands written.
        if not _peer_has_a_reason(within_s=_PEER_GRACE_S):
            print(f"rank {rank}:\n{traceback.format_exc()}", end="", file=sys.stderr)
    written = _write_outcome(Outcome(rank, code, time.time_ns(), line))
    if line and not written:
        print(f"error: {line}" if rank == 0 else f"error: rank {rank}: {line}", file=sys.stderr)
    if line and rank != 0:
        # Most mistakes are every rank's. The first to leave ends the others, and rank 0 is to name it.
        _wait_for_main_rank(within_s=_PEER_GRACE_S)
    sys.exit(code)


def _wait_for_main_rank(within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and all(outcome.rank != 0 for outcome in _read_outcomes()):
        time.sleep(0.02)


def _peer_has_a_reason(within_s: float) -> bool:
    """Did another rank end with a code of its own (not a traceback), now or `within_s`?"""
    deadline_s = time.monotonic() + within_s
    while _OUTCOMES in os.environ:
        if any(outcome.code != 1 for outcome in _read_outcomes()):
            return True
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    return False


def _die_with_launcher() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The launcher may have died before that line.
    if _LAUNCHER in os.environ and os.getppid() != int(os.environ[_LAUNCHER]):
        os._exit(1)


def _write_outcome(outcome: Outcome) -> bool:
    folder = os.environ.get(_OUTCOMES)
    if folder is None or not os.path.isdir(folder):
        return False
    temporary = Path(folder, f".{outcome.rank}")
    temporary.write_text(json.dumps(outcome._asdict()), encoding="utf-8")
    temporary.rename(Path(folder, f"{outcome.rank}.json"))
    return True


def _read_outcomes() -> list[Outcome]:
    """The outcomes written so far, earliest first."""
    folder = Path(os.environ.get(_OUTCOMES, os.devnull))
    outcomes = [Outcome(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.time_ns)


# ---- in the launcher


def split_flags(arguments: Sequence[str], own_flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """`(flags, rest)`: torchrun's flags with their values, and everything from the first positional on."""
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


def torchrun(flags: Sequence[str], arguments: Sequence[str]) -> NoReturn:
    """Run `lptune ARGUMENTS` on the ranks that `flags` describe; exit with the first failure's code."""
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = _parser().parse_args([*flags, "--module", "lptune.cli.main", *arguments])
    signals = _check(args)
    if args.nnodes in ("1", "1:1"):
        _stay_on_this_machine(args)
    args.signals_to_handle = ""  # handled here
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVE_GRACE_S)
    folder = Path(tempfile.mkdtemp(prefix="lptune-"))
    os.environ[_OUTCOMES], os.environ[_LAUNCHER] = str(folder), str(os.getpid())
    args.log_dir = args.log_dir or str(folder / "torchrun")
    _silence("torch.distributed")
    try:
        _forward_once(signals, SignalException)
        torch.distributed.run.run(args)
        sys.exit(0)
    except torch.distributed.DistNetworkError as error:
        raise UserError(f"run: torchrun: {str(error).splitlines()[0]}") from None
    except ChildFailedError as error:
        sys.exit(_verdict({rank: failure.exitcode for rank, failure in error.failures.items()}))
    except SignalException as error:
        failed = [outcome for outcome in _read_outcomes() if outcome.code not in (130, 143)]
        sys.exit(_verdict({}) if failed else 128 + error.sigval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdict(exit_codes: dict[int, int]) -> int:
    """The launcher's exit code from the ranks' (negative: killed by that signal); prints its line."""
    outcomes = _read_outcomes()
    silent = {
        rank: code for rank, code in exit_codes.items() if rank not in {outcome.rank for outcome in outcomes}
    }
    killed = {rank: -code for rank, code in silent.items() if code < 0 and code != -signal.SIGTERM}
    if killed and not any(outcome.code in (2, 3) for outcome in outcomes):
        rank, number = min(killed.items())
        print(f"error: rank {rank} was killed by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number
    if not outcomes:
        first = next((code for code in silent.values() if code > 0), -signal.SIGTERM)
        return first if first > 0 else 128 - first
    mistakes = {outcome.rank: outcome.line for outcome in outcomes if outcome.code == outcomes[0].code}
    if outcomes[0].line:
        rank = min(mistakes)
        print(
            f"error: {mistakes[rank]}" if rank == 0 else f"error: rank {rank}: {mistakes[rank]}",
            file=sys.stderr,
        )
    return outcomes[0].code


def _parser() -> "argparse.ArgumentParser":
    """torchrun's parser, with a UserError for what it would print."""
    from torch.distributed.run import get_args_parser

    def error(message: str) -> NoReturn:
        raise UserError(f"run: torchrun: {message}; see `torchrun --help`")

    parser = get_args_parser()
    parser.allow_abbrev = False
    parser.error = error  # type: ignore[method-assign]
    return parser


def _stay_on_this_machine(args: "argparse.Namespace") -> None:
    """Rendezvous on a free port of the loopback address, unless a flag says something else."""
    defaults = _parser()
    names = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
    if all(getattr(args, name) == defaults.get_default(name) for name in names):
        args.standalone = True
        args.local_addr = args.local_addr or "127.0.0.1"
        stay_on_loopback()


def _check(args: "argparse.Namespace") -> list[signal.Signals]:
    """The signals to handle; refuses, before anything is touched, what torchrun would not take kindly."""
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
    try:
        torch.distributed.run.config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"run: torchrun: {error}") from None
    return signals


def _forward_once(
    signals: Sequence[signal.Signals], exception: Callable[[str, signal.Signals], Exception]
) -> None:
    """Raise `exception` on the first of the signals, which torchrun answers by forwarding it to the ranks."""
    first_s: float | None = None

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = time.monotonic()
            raise exception(f"signal {number}", signal.Signals(number))
        if time.monotonic() - first_s > _REPEAT_GRACE_S:
            os._exit(128 + number)

    for number in signals:
        signal.signal(number, handle)


def _silence(prefix: str) -> None:
    """Switch off loggers: torchrun repeats as errors of its own what the ranks have said already."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefix):
            logging.getLogger(name).setLevel(logging.CRITICAL)
