"""Ctrl-C, SIGTERM and SIGHUP in all commands but `run`, which saves first (lptune/launch/preemption.py).

Python's own reaction, a KeyboardInterrupt, prints a traceback while modules are imported, and is lost if a
module catches every exception. So the process ends at once, with code 128 + n. An exception is raised only
where something must be undone, such as a half-written folder.
"""

import os
import signal
import sys

_undoes = False
_received = 0


def listen() -> None:
    """Handles the three signals from now on. A signal that is ignored (in a background job) stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _react)


class Undoing:
    """The first signal in the block raises SystemExit: at once, and again at the end, if a library caught it.

    Later signals do nothing, so that they do not interrupt the undoing. The exit code is that of the first.
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
    except Exception:  # for example in the middle of a write
        pass
    os._exit(_received)
