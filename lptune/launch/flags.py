"""torchrun's flags: how they are told from the rest of a command line, completed and checked.

lptune adds nothing to torchrun's own parser. It refuses the flags that a launch cannot follow (restarts
within it), and chooses the rendezvous where no flag does.
"""

import copy
import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from lptune.base.errors import UserError, closest
from lptune.base.text import printable
from lptune.launch.rendezvous import BACKEND, LOOPBACK, NUMBERS, MeetingPoint, is_address
from lptune.launch.restarts import SUPERVISED

if TYPE_CHECKING:
    import argparse

RANK_WORDS = ("auto", "cpu", "gpu", "xpu")
"""What --nproc-per-node takes instead of a number."""
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SKYPILOT_TASK_ID")


def split_flags(arguments: Sequence[str], own_flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """`(flags, rest)`: torchrun's flags with their values, and all from the first positional argument on."""
    namespace, unknown = parser().parse_known_args([*arguments, "no-recipe"])
    flags = [argument for argument in unknown if argument.startswith("-")]
    if flags:
        name = flags[0].partition("=")[0]
        known = re.findall(r"--[a-z][a-z-]+(?![\w-])", parser().format_help())  # not half of --nproc_per_node
        raise UserError(
            f"run: no such option: {name}{closest(name, [*known, *own_flags])}; see `lptune run --help`"
        )
    rest = [namespace.training_script, *namespace.training_script_args][:-1]
    return list(arguments[: len(arguments) - len(rest)]), rest


def split_command(
    command: str, arguments: Sequence[str], own_flags: Sequence[str]
) -> tuple[list[str], list[str]]:
    """torchrun's flags, which stand before RECIPE, and what follows them. command: for messages.

    Only torchrun's own parser knows which flag takes a value, so the first flag that is not ours costs an
    import of torch.
    """
    torchrun_flags, positional = list[str](), list(arguments)
    if arguments and arguments[0].startswith("-"):
        torchrun_flags, positional = split_flags(arguments, own_flags)
    for argument in positional:
        if argument.startswith("-"):
            hint = closest(argument.partition("=")[0], own_flags) or "; torchrun's flags stand before RECIPE"
            raise UserError(f"{command}: no such option here: {argument}{hint}")
    return torchrun_flags, positional


def check_count(command: str, name: str, value: str | None) -> None:
    """Raises UserError unless `value` of the flag `name` (--nnodes or --nproc-per-node) is a number, or what
    else torchrun takes there.
    """
    words = RANK_WORDS if name == "--nproc-per-node" else ()
    pattern = r"[1-9]\d*" if words else r"[1-9]\d*(:[1-9]\d*)?"
    if value is not None and value not in words and not re.fullmatch(pattern, value):
        raise UserError(
            f"{command}: {name}: must be a positive integer, found {value!r:.60}{closest(value, words)}"
        )


def check_backend(command: str, value: str) -> None:
    """Raises UserError for a `value` of --rdzv-backend other than torchrun's own default."""
    if value != "static":
        raise UserError(
            f"{command}: --rdzv-backend (or PET_RDZV_BACKEND): {value}: lptune's machines meet in their own "
            "way, in which nothing is unpickled; leave it out"
        )


def known_ranks(
    nnodes: str | None, nproc_per_node: str | None, *, here: bool = True
) -> tuple[int | None, int | None]:
    """Number of machines, and of ranks on each; None if other flags or variables decide them, too.

    here: whether the run starts in this environment, with its variables of torchrun.
    """
    machines, ranks = numbers_of_machines("run", nnodes or "1"), nproc_per_node or "1"
    is_set = here and any(name.startswith("PET_") for name in os.environ)
    if is_set or len(machines) > 1 or not ranks.isdigit():
        return None, None
    return machines[0], int(ranks)


def numbers_of_machines(command: str, nnodes: str) -> range:
    """Those that --nnodes allows: N, or MIN:MAX. Raises UserError if the second is smaller."""
    smallest, _, largest = nnodes.partition(":")
    found = range(int(smallest), int(largest or smallest) + 1)
    if not found:
        raise UserError(f"{command}: --nnodes: {nnodes}: the first number is the smaller one")
    return found


def launches_by_environment() -> bool:
    """Whether torchrun's variables ask for more than one rank or machine, as a job of Kubernetes does."""
    return any(
        os.environ.get(name, "1") not in ("", "1", "1:1") for name in ("PET_NNODES", "PET_NPROC_PER_NODE")
    )


def parser() -> "argparse.ArgumentParser":
    """torchrun's parser; it raises UserError where the original prints and exits."""
    quieten()
    from torch.distributed.run import get_args_parser

    def error(message: str) -> NoReturn:
        raise UserError(f"run: torchrun: {message}; see `torchrun --help`")

    arguments = get_args_parser()
    arguments.allow_abbrev = False
    arguments.error = error  # type: ignore[method-assign]
    return arguments


def meeting_point(args: "argparse.Namespace", flags: Sequence[str], output_dir: str) -> MeetingPoint:
    """Where the machines meet, by torchrun's flags and variables, which are then filled in for torchrun.

    output_dir: of the config, from which the run gets its id if no flag and no scheduler gives one. Raises
    UserError for what could only hang.
    """
    machines = numbers_of_machines("run", f"{args.nnodes}")
    num_machines, min_machines = machines[-1], machines[0]
    is_supervised = SUPERVISED in os.environ
    if min_machines < num_machines and not is_supervised:
        raise UserError(
            f"run: --nnodes: {args.nnodes}: a launch does not change its size; give one number, or add "
            "--restarts N, which goes on with the machines that are left"
        )
    if args.max_restarts:
        raise UserError(
            "run: --max-restarts: ranks are not restarted within a launch; --restarts N starts the run again"
        )
    check_backend("run", args.rdzv_backend)
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    timeouts_s = _timeouts_s(args.rdzv_conf)
    run_id = args.rdzv_id if args.rdzv_id != "none" else next(
        (os.environ[name] for name in _JOB_IDS if os.environ.get(name)),
        # Not of the config: machines whose configs differ must meet to be told so.
        hashlib.sha256(output_dir.encode(errors="surrogatepass")).hexdigest()[:12],
    )  # fmt: skip
    args.rdzv_id, args.rdzv_backend = run_id, BACKEND
    if num_machines == 1:
        args.standalone = False  # it would choose torchrun's rendezvous
        if args.rdzv_endpoint:
            line = f"note: the endpoint {args.rdzv_endpoint} is not used: this is one machine (--nnodes)"
            print(printable(line), file=sys.stderr, flush=True)
        args.rdzv_endpoint = f"{LOOPBACK}:0"
        return MeetingPoint("", 0, 0, 1, "", run_id, *timeouts_s)
    if args.standalone:
        raise UserError(f"run: --standalone is for one machine, --nnodes is {args.nnodes}")
    if not args.rdzv_endpoint and not _is_set("--master-addr", given):
        raise UserError(
            f"run: --nnodes {args.nnodes}: the machines need a place to meet; give all of them the same "
            "--rdzv-endpoint HOST:PORT, the name of one of them and a port that is free there"
        )
    args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    host, port = _host_and_port(args.rdzv_endpoint)
    machine = _machine(args, given, num_machines)
    if args.local_addr and not is_address(args.local_addr):
        raise UserError(
            f"run: --local-addr: must be an address of this machine, found {args.local_addr!r:.60}"
        )
    args.node_rank = 0  # torchrun's own numbers would be of its static rendezvous
    where = (host, port, machine, num_machines, args.local_addr or "", run_id)
    return MeetingPoint(*where, *timeouts_s, min_machines, is_supervised)


def _host_and_port(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != endpoint or parts.path:
        raise UserError(
            f"run: --rdzv-endpoint: must be HOST:PORT with a port of 1 to 65535, found {endpoint!r:.80}"
        )
    return host, port


def _machine(args: "argparse.Namespace", given: set[str], num_machines: int) -> int | None:
    names = [name for name in NUMBERS if name in os.environ]
    if "--node-rank" in given:
        name, text = "--node-rank", str(args.node_rank)
    elif names:
        name, text = names[0], os.environ[names[0]]
    else:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < num_machines):
        last = num_machines - 1
        raise UserError(f"run: {name}: must be 0 to {last} (--nnodes {num_machines}), found {text!r:.40}")
    return int(text)


def _timeouts_s(rdzv_conf: str) -> tuple[float, float]:
    """join_timeout and last_call_timeout."""
    seconds = {"join_timeout": 600.0, "last_call_timeout": 30.0}  # those of torchrun
    for part in filter(None, rdzv_conf.split(",")):
        name, _, value = part.strip().partition("=")
        name = "join_timeout" if name == "timeout" else name
        if name not in seconds or not re.fullmatch(r"[1-9]\d*", value):
            names = " or ".join(f"{each}=SECONDS" for each in seconds)
            raise UserError(f"run: --rdzv-conf: must be {names}, found {part!r:.60}")
        seconds[name] = float(value)
    return seconds["join_timeout"], seconds["last_call_timeout"]


def quieten() -> None:
    """Keeps torch's C++ code from printing a stack for each failure of a store, which a launcher catches and
    tells in one line. Call it before torch is imported. In the ranks only warnings are kept back.
    """
    if "torch" not in sys.modules and "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        import torch  # noqa: F401

        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def _is_set(flag: str, given: set[str]) -> bool:
    return flag in given or f"PET_{flag[2:].replace('-', '_').upper()}" in os.environ


def stay_on_loopback() -> None:
    """Keeps gloo on the loopback device: on one machine, no port needs to be open to the network."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def keeps_logs_itself(args: "argparse.Namespace") -> bool:
    """Whether a flag tells torchrun what to do with the output of the ranks."""
    defaults = parser()
    names = ("log_dir", "redirects", "tee", "local_ranks_filter")
    return any(getattr(args, name) != defaults.get_default(name) for name in names)


def check(args: "argparse.Namespace") -> list[signal.Signals]:
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
