"""The attacked process: `lptune ARGUMENTS` in a process forked off one that has imported torch.

A cold start is nine tenths of a command that ends with one line. What lptune/cli/__init__.py does at a start
(streams, signals) is done again in the fork. Imports Python's own modules only, since each fork
imports it.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from tests.faults.adversary import phases

NO_READER = "no reader"


class Streams(NamedTuple):
    """What stands behind descriptors 0, 1 and 2: a path, or NO_READER (a pipe that nothing reads)."""

    stdin: str = os.devnull
    stdout: str = os.devnull
    stderr: str = os.devnull


def call(arguments: list[str], folder: str, environment: Mapping[str, str], streams: Streams) -> None:
    """Never returns. The process has a session of its own, by which what it starts and leaves is found."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up once and kept
    opened = [_open(number, stream) for number, stream in enumerate(streams)]
    for number, descriptor in enumerate(opened):
        os.dup2(descriptor, number)
    import torch

    import lptune.cli
    from lptune.cli.main import main

    torch.set_num_threads(1)
    sys.argv = ["lptune", *arguments]
    sys.orig_argv = [sys.executable, "lptune", *arguments]
    importlib.reload(lptune.cli)
    open(os.path.join(environment[phases.FOLDER], "started"), "w").close()
    main(arguments)


def _open(number: int, stream: str) -> int:
    if stream == NO_READER:
        read_end, write_end = os.pipe()
        os.close(read_end)
        return write_end
    return os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
