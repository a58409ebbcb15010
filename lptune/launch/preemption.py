"""Preemption: how a run receives the request to stop, and how it saves its work first.

SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (Slurm, before a time limit) and SIGHUP (a terminal that
closes) ask a run to stop. A SIGHUP that is ignored (nohup) stays ignored.

The signals are blocked, and a thread waits for them. They are blocked before anything else happens, and the
thread calls sigwait. A Python handler would run between two bytecodes of the main thread, so not during the
minutes that it may spend in a collective or a compiler. And a mask, unlike a handler, is inherited by every
thread and, across fork and exec, by every process that a run starts. A signal to the process group reaches
all of them; unblocked, it would kill Inductor's compile workers, or the g++ below them, in the middle of the
step that the run wants to finish. Ranks inherit the mask of their launcher: a signal that reaches a rank
before its first line of Python is pending, not fatal.

Before training begins, a signal ends the process at once. Training begins with the first call of `requested`
(in a recipe: `world.stop_requested()`). Until then there is nothing to save: a signal ends the process with
code 143 while it tokenizes or loads. From that call on, a signal is only noted, and the recipe calls again
after every step.

A second signal. A signal to the group and its copy from the launcher arrive twice, so a repetition within
`GRACE_S` changes nothing. After that time a second signal is meant to end the process at once: it ends with
128 + n. With several ranks, only the launcher may decide that, since torchrun sends a SIGTERM to
ranks that are still saving when the first rank has exited.

The price: a child process must be ended through a pipe or by SIGKILL, since it does not react to SIGTERM.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lptune.launch.outcome import OUTCOMES, Outcome, announce, write_outcome

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP})
STOPPED = 143
"""Exit code of a run that was stopped by any of the signals. The same command continues the run."""
GRACE_S = 5.0

Reaction = Callable[[signal.Signals], None]


class Listener(threading.Thread):
    """Receives the signals of this process until `close`. Must be made in the main thread.

    first: called with the first signal. again: called with a signal more than `GRACE_S` after the first.
    """

    def __init__(self, first: Reaction, again: Reaction) -> None:
        super().__init__(name="lptune-signals", daemon=True)
        self.first, self.again = first, again
        self._first_s: float | None = None
        self._closing = False
        # If it were blocked, sigwait would return an ignored signal like any other.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._signals = SIGNALS - {signal.SIGHUP} if is_ignored else SIGNALS
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # this thread inherits the mask
        # Threads that existed before do not block the signals, and the kernel may choose one of them.
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda number, _: self._take(signal.Signals(number)))
            for number in self._signals
        }
        self.start()

    def run(self) -> None:
        """The thread: waits for signals until `close`."""
        while True:
            number = signal.sigwait(self._signals)
            if self._closing:
                return
            self._take(signal.Signals(number))

    def close(self) -> None:
        """Restores the handlers and the mask that were in place before."""
        self._closing = True
        assert self.ident is not None
        signal.pthread_kill(self.ident, signal.SIGUSR1)
        self.join()
        # A repetition that is still pending is consumed here; unblocked, it would end the program.
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
    """Receives the signals from now to the end of the process; `lptune run` begins with this."""
    react(_note, _insist)


def react(first: Reaction, again: Reaction) -> None:
    """Replaces the reactions of `listen` by those of a launcher."""
    global _listener
    if _listener is None:
        _listener = Listener(first, again)
    _listener.first, _listener.again = first, again


def requested() -> signal.Signals | None:
    """The signal that asked this process to stop, or None. After the first call, signals are only noted.

    In a program that did not call `listen`, the first call begins to receive signals, and `release` ends it;
    both must be in the main thread, a rule of Python.
    """
    global _was_asked, _is_borrowed, _stopped_by
    if _listener is None and threading.current_thread() is threading.main_thread():
        _is_borrowed, _stopped_by = True, None
        listen()
    _was_asked = True
    return _stopped_by


def release() -> None:
    """Ends what the first call of `requested` began; does nothing after `listen`."""
    global _listener, _is_borrowed, _was_asked
    if _is_borrowed and _listener is not None:
        _listener.close()
        _listener, _is_borrowed, _was_asked = None, False, False


def announce_stop(number: signal.Signals, whose: str) -> None:
    """Prints what happens after this first signal, and what a second signal would do."""
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
        # Only here: otherwise the main thread would find the note while this one ends, and print it again.
        _stopped_by = number
        if is_main and not has_launcher:
            announce_stop(number, "the work in progress is")
        return
    line = f"stopped by {number.name}: nothing new to save"
    try:
        if has_launcher:
            announce()  # this may come before the rank has announced itself
            rank, host = int(os.environ["RANK"]), socket.gethostname()
            write_outcome(Outcome(rank, STOPPED, time.time_ns(), host, line, nothing_to_save=True))
        elif is_main:
            print(line, file=sys.stderr, flush=True)
    finally:
        os._exit(STOPPED)


def _insist(number: signal.Signals) -> None:
    if "RANK" not in os.environ:
        os._exit(128 + number)
