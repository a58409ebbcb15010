"""Preemption: how a run hears that it is to stop, and what becomes of the work since its last checkpoint.

SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (Slurm, before a time limit) and SIGHUP (a terminal that
closes) ask a run to stop. A SIGHUP that is ignored (nohup) stays ignored.

Blocked, and waited for. The signals are blocked before anything else happens, and a thread waits for them
(sigwait). A Python handler would run between two bytecodes of the main thread, so not while that is inside a
collective or a compiler for minutes. And a mask, unlike a handler, is inherited: by every thread and, across
fork and exec, by every process that a run starts. A group signal hits them all; it would kill Inductor's
compile workers, or the g++ below them, in the middle of the step that is to be saved. Ranks inherit the mask
of their launcher: what reaches one before its first line of Python is pending, not fatal.

At once, until somebody asks. Before the first question (`requested`; in a recipe `world.stop_requested()`)
nothing has been trained that no checkpoint holds: a signal ends the process with 143 where it stands, be it
tokenizing or loading. From that question on a signal is noted, and the recipe asks again at every boundary.

Twice. A group signal and its forwarding by a launcher arrive twice: within `GRACE_S` a repetition changes
nothing. After that somebody insists, and the process ends at once with 128 + n. Of several ranks only the
launcher takes it for that: torchrun sends a SIGTERM to those that still save when the first has left.

The price: a child process must be ended through a pipe or by SIGKILL, since SIGTERM does not reach it.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lptune.ranks.outcome import OUTCOMES, Outcome, announce, write_outcome

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP})
STOPPED = 143
"""Exit code of a run that was asked to stop, by whichever of the signals: run it again and it continues."""
GRACE_S = 5.0

Reaction = Callable[[signal.Signals], None]


class Listener(threading.Thread):
    """Takes the signals for this process, from its making, in the main thread, to `close`.

    first: called with the first signal. again: with one that comes later than `GRACE_S` after it.
    """

    def __init__(self, first: Reaction, again: Reaction) -> None:
        super().__init__(name="lptune-signals", daemon=True)
        self.first, self.again = first, again
        self._first_s: float | None = None
        self._closing = False
        # Blocked, an ignored signal would be waited for like any other.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._signals = SIGNALS - {signal.SIGHUP} if is_ignored else SIGNALS
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # this thread will inherit it
        # Threads that a program had before do not block, and the kernel may choose one of them.
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda number, _: self._take(signal.Signals(number)))
            for number in self._signals
        }
        self.start()

    def run(self) -> None:
        """Waits for signals until `close`."""
        while True:
            number = signal.sigwait(self._signals)
            if self._closing:
                return
            self._take(signal.Signals(number))

    def close(self) -> None:
        """Gives the signals back to whom they belonged."""
        self._closing = True
        assert self.ident is not None
        signal.pthread_kill(self.ident, signal.SIGUSR1)
        self.join()
        # A repetition that is still pending was meant for us; unblocked, it would end the program.
        while pending := self._signals.intersection(signal.sigpending()):
            signal.sigwait(pending)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _take(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self.first(number)
        elif now_s - self._first_s > GRACE_S:
            self.again(number)


_listener: Listener | None = None
_is_borrowed = False
_was_asked = False
_stopped_by: signal.Signals | None = None


def listen() -> None:
    """The signals are ours for the whole life of this process: `lptune run` begins with it."""
    react(_note, _insist)


def react(first: Reaction, again: Reaction) -> None:
    """`listen`, with a launcher's reactions."""
    global _listener
    if _listener is None:
        _listener = Listener(first, again)
    _listener.first, _listener.again = first, again


def requested() -> signal.Signals | None:
    """The signal that asked this process to stop. From the first call on a signal does not end it at once.

    In a program that does not `listen`, the first call takes the signals, and `release` gives them back; only
    in the main thread, as Python wants it.
    """
    global _was_asked, _is_borrowed, _stopped_by
    if _listener is None and threading.current_thread() is threading.main_thread():
        _is_borrowed, _stopped_by = True, None
        listen()
    _was_asked = True
    return _stopped_by


def release() -> None:
    """Gives the signals back if `requested` took them."""
    global _listener, _is_borrowed, _was_asked
    if _is_borrowed and _listener is not None:
        _listener.close()
        _listener, _is_borrowed, _was_asked = None, False, False


def announce_stop(number: signal.Signals, whose: str) -> None:
    """Says what the first signal does, and what a second one would."""
    key = "Ctrl-C" if number == signal.SIGINT else number.name
    print(
        f"{number.name}: {whose} finished and saved first; {key} again after {GRACE_S:.0f} s ends at once",
        file=sys.stderr,
        flush=True,
    )


def _note(number: signal.Signals) -> None:
    global _stopped_by
    has_launcher = OUTCOMES in os.environ
    is_main = os.environ.get("RANK", "0") == "0"
    if _was_asked:
        # Only here: noted while this thread ends the process, the main one would find it and say it again.
        _stopped_by = number
        if is_main and not has_launcher:
            announce_stop(number, "the work in progress is")
        return
    line = f"stopped by {number.name}: nothing new to save"
    try:
        if has_launcher:
            announce()  # it may be too early for that to have been done
            rank, host = int(os.environ["RANK"]), socket.gethostname()
            write_outcome(Outcome(rank, STOPPED, time.time_ns(), host, line, nothing_to_save=True))
        elif is_main:
            print(line, file=sys.stderr, flush=True)
    finally:
        os._exit(STOPPED)


def _insist(number: signal.Signals) -> None:
    if "RANK" not in os.environ:
        os._exit(128 + number)
