"""Ctrl-C and SIGTERM in the commands that save nothing: all but `run`, which has lptune/ranks/preemption.py.

Python's own reaction, a KeyboardInterrupt, is a traceback while modules are imported, and is lost where one
of them catches whatever is raised. So the process ends where it stands, with 128 + n. Only where something
must be undone (a half-written folder) an exception is raised.
"""

import os
import signal
import sys

_undoes = False
_received = 0


def listen() -> None:
    """From now on. A signal that is ignored (a job in the background of a script) stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _react)


class Undoing:
    """The first signal within raises SystemExit, at the end at the latest: a library may catch it.

    Later ones do nothing, so that none ends the undoing; the exit code is that of the first.
    """

    def __enter__(self) -> None:
        global _undoes
        _undoes = True

    def __exit__(self, *_: object) -> None:
        global _undoes
        _undoes = False
        if _received:
            sys.exit(_received)


def _react(number: int, _: object) -> None:
    global _received
    is_first, _received = not _received, _received or 128 + number
    if _undoes:
        if is_first:
            raise SystemExit(_received)
        return
    try:  # noqa: SIM105  (contextlib takes a while to import, and this comes first of all)
        sys.stdout.flush()
    except Exception:  # in the middle of a write of its own, say
        pass
    os._exit(_received)
