"""A run as a process of its own, for a sweep and for restarts (restarts.py).

`python -m lptune.launch.bound PID ARGUMENTS`: `lptune ARGUMENTS` in this process, bound to the life of its
parent PID: if that is killed, this process gets SIGTERM, so that a run saves and leaves the device. The
kernel keeps the setting across exec. It is made here and not between fork and exec, where a parent with
threads must not run Python.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from lptune.launch import preemption


class Runner:
    """Runs `lptune` in a child process, one at a time, and passes the signals of this process on to it."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Set by the first signal."""
        self._signal: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None
        preemption.react(self._first, self._pass_on)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """The exit code of `lptune ARGUMENTS`; 128 + n if signal n killed it. environment: added to this
        process's.
        """
        bound = ("-P", "-m", __name__, str(os.getpid()))  # -P: not the modules of this folder
        command = [sys.executable, *bound, *arguments]
        self._child = subprocess.Popen(command, env={**os.environ, **(environment or {})})
        if self._signal is not None:
            self._pass_on(self._signal)
        code = self._child.wait()
        self._child = None
        return 128 - code if code < 0 else code

    def _first(self, number: signal.Signals) -> None:
        self._signal = number
        self._pass_on(number)
        self.stopped.set()

    def _pass_on(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.send_signal(number)


def main() -> None:
    """Binds this process and becomes `lptune`."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it died before that call
        os._exit(preemption.STOPPED)
    os.execv(sys.executable, [sys.executable, "-m", "lptune.cli.main", *arguments])


if __name__ == "__main__":
    main()
