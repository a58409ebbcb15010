"""`lptune` in a process of its own that need not import torch: it is forked off a server that has.

Start-up is nine tenths of a command that ends with one line. A test of many such commands runs them here, and
some as a user does (the `lptune` fixture): command line, streams and exit code are the same.
"""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from tests.cli.conftest import Finished, clean_environment

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "lptune.cli.main",
        "lptune.checkpoint",
        "lptune.data",
        "lptune.distributed",
        "lptune.linear",
        "lptune.models.decoder",
        "lptune.training",
        "torch._dynamo",  # for whatever makes a model: half of the time of such a command
    ]
)


def lptune(
    arguments: list[str], *, folder: Path, environment: dict[str, str] | None = None, timeout_s: float = 60
) -> Finished:
    """`lptune ARGUMENTS` in `folder`."""
    with tempfile.TemporaryDirectory() as output:
        return _lptune(arguments, folder, clean_environment() | (environment or {}), Path(output), timeout_s)


def _lptune(
    arguments: list[str], folder: Path, environment: dict[str, str], output: Path, timeout_s: float
) -> Finished:
    process = CONTEXT.Process(target=_call, args=(arguments, folder, environment, output))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"lptune {' '.join(arguments)}: still running after {timeout_s} s")
    stdout, stderr = ((output / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def _call(arguments: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    import torch

    from lptune.cli.main import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        os.dup2(os.open(output / name, os.O_CREAT | os.O_WRONLY), stream.fileno())
    main(arguments)
