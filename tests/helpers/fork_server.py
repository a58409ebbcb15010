"""Warm processes: forked off one that has imported torch and lptune (tests/helpers/preloaded.py).

`tests.helpers.ranks` runs functions in them, `tests.helpers.warm` the command line. A process that starts by
itself, as a user's does, costs four seconds of CPU time before it does anything: some tests start one, as the
proof of how a user starts, and all others fork.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PRELOADED = "tests.helpers.preloaded"
CONTEXT = multiprocessing.get_context("forkserver")
"""Makes what forks share: barriers, values."""


def process(target: Callable[..., None], *arguments: Any, daemon: bool = False) -> Any:
    """Starts `target(*arguments)` in a fork, a multiprocessing.Process, with this process's environment.

    `target` is a function at the top of a module, and the arguments can be pickled.
    """
    _start_server()
    started = CONTEXT.Process(target=_call, args=(dict(os.environ), target, arguments), daemon=daemon)
    started.start()
    return started


def pipe() -> tuple[Connection, Connection]:
    """Two ends; a fork holds only those that it was given."""
    return CONTEXT.Pipe()


def _call(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def _check_preloaded() -> None:
    # The server ignores a module that it cannot import.
    assert _PRELOADED in sys.modules, f"the fork server could not import {_PRELOADED}"


@cache
def _start_server() -> None:
    """One for all of this process's forks, whichever folder it is in when it needs the first; returns when it
    has imported all, so that no time limit has to allow for it.
    """
    CONTEXT.set_forkserver_preload([_PRELOADED])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), before)))
    try:
        forkserver.ensure_running()
        first = CONTEXT.Process(target=_check_preloaded)
        first.start()
        first.join()
        assert first.exitcode == 0
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
