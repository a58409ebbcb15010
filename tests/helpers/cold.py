"""Cold processes: an interpreter that starts as a user's does, as the proof of a start.

One that imports torch costs four CPU seconds before it does anything. Where the start is not what a test
proves, it forks: `tests.helpers.warm` for the command line, `tests.helpers.ranks` for functions.
tests/test_architecture.py holds that no other module of the tests starts an interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Finished = subprocess.CompletedProcess[str]
Process = subprocess.Popen[str]

LPTUNE = ("-m", "lptune.cli.main")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")

_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def environment() -> dict[str, str]:
    """The environment without what a launcher or a developer may have left in it.

    PYTHONPATH stays, behind this tree: a machine that lacks a package may have it in a folder of its own
    (docs/gpu.md). One thread per process, so that sums are taken in one order.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("LPTUNE_", "TORCHELASTIC_", "PET_", "HF_"))
    }
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    """`python ARGUMENTS`."""
    return [sys.executable, *arguments]


def run(*arguments: str, folder: Path = ROOT, timeout_s: float = 300, **variables: str) -> Finished:
    """`python ARGUMENTS` in `folder` to its end, with further variables of the environment."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def start(
    *arguments: str, folder: Path = ROOT, variables: dict[str, str] | None = None, **options: Any
) -> Process:
    """Starts `python ARGUMENTS` in `folder`; both streams are pipes unless the options of Popen say else."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command(*arguments), cwd=folder, env=environment() | (variables or {}), **options)
