"""`python -m lptune.launch.bound PID ARGUMENTS`: `lptune ARGUMENTS` in this process, bound to the life of its
parent PID: if that is killed, this process gets SIGTERM, so that a run saves and leaves the device.

The kernel keeps the setting across exec. It is made here and not between fork and exec, where a parent with
threads must not run Python.
"""

import ctypes
import os
import signal
import sys

from lptune.launch.preemption import STOPPED


def main() -> None:
    """Binds this process and becomes `lptune`."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it died before that call
        os._exit(STOPPED)
    os.execv(sys.executable, [sys.executable, "-m", "lptune.cli.main", *arguments])


if __name__ == "__main__":
    main()
