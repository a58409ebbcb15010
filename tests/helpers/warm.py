"""`lptune` in a process of its own that need not import torch: it is forked off one that has.

Start-up is nine tenths of a command that ends with one line. A test of many such commands runs them here, and
some as a user does (tests/helpers/cold.py): command line, streams and exit code are the same.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import cold, fork_server
from tests.helpers.cold import Finished
from tests.helpers.launch import free_port, rank_environment


def lptune(
    arguments: list[str],
    *,
    folder: Path,
    environment: dict[str, str] | None = None,
    ranks: int = 1,
    timeout_s: float = 60,
) -> Finished:
    """`lptune ARGUMENTS` in `folder`; on several ranks as under plain torchrun, without lptune's launcher.

    Of several ranks, what one that a signal ended said, else the one with the largest exit code.
    """
    deadline = time.monotonic() + timeout_s
    port = free_port() if ranks > 1 else 0
    with tempfile.TemporaryDirectory() as output:
        processes = []
        for rank in range(ranks):
            said = Path(output, str(rank))
            said.mkdir()
            variables = rank_environment(rank, ranks, port) if ranks > 1 else {}
            processes.append(start(arguments, folder, variables | (environment or {}), said))
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if late := [process for process in processes if process.exitcode is None]:
            for process in late:
                process.kill()
            raise TimeoutError(f"lptune {' '.join(arguments)}: still running after {timeout_s} s")
        codes = [process.exitcode for process in processes]
        worst = max(range(ranks), key=lambda rank: (codes[rank] < 0, abs(codes[rank])))
        stdout, stderr = (
            Path(output, str(worst), name).read_text(encoding="utf-8") for name in ("stdout", "stderr")
        )
        return Finished(arguments, processes[worst].exitcode, stdout, stderr)


def kill(
    arguments: list[str],
    folder: Path,
    once: Callable[[], object],
    number: signal.Signals = signal.SIGKILL,
    *,
    ranks: int = 1,
) -> int:
    """Starts `lptune ARGUMENTS`, sends the last rank a signal as soon as `once()` is true, and returns the
    exit code of all. What rank 0 said is in `folder`: `stdout` and `stderr`.
    """
    port, processes = free_port() if ranks > 1 else 0, []
    for rank in range(ranks):
        said = folder / f"rank-{rank}" if rank else folder
        said.mkdir(exist_ok=True)
        variables = rank_environment(rank, ranks, port) if ranks > 1 else {}
        processes.append(start(arguments, folder, variables, said))
    last = processes[-1]
    while last.is_alive() and not once():
        time.sleep(0.005)
    if last.is_alive():
        os.kill(last.pid, number)
    for process in processes:
        process.join(120)
    (code,) = {process.exitcode for process in processes}
    assert code is not None
    return int(code)


def start(arguments: list[str], folder: Path, environment: dict[str, str], output: Path) -> Any:
    """Starts it, a multiprocessing.Process that writes `stdout` and `stderr` in the folder `output`."""
    return fork_server.process(_call, arguments, folder, cold.environment() | environment, output)


def _call(arguments: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    import torch

    from lptune.cli.main import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if "TORCH_LOGS" in environment:  # read at import, which was in another environment
        torch._logging._init_logs()
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        os.dup2(os.open(output / name, os.O_CREAT | os.O_WRONLY), stream.fileno())
    main(arguments)
