"""How ranks are started, watched and ended, and what a rank does for its launcher.

    in the launcher   launcher.py    starts torchrun; the exit code; where logs end up
                      flags.py       torchrun's flags
                      rendezvous.py  the launchers of several machines meet, in a store that one hosts
                      watch.py       ends all ranks after the first failure, and prints the cause
                      exchange.py    messages between the launchers of several machines
    above it          restarts.py    starts a launch again after a failure (`--restarts`)
                      bound.py       a run as a process that does not outlive its parent
    in a rank         rank.py        start and end of a process that is a rank
    in both           outcome.py     files by which a rank tells how it ends
                      hangs.py       finds out that no rank goes on, and which one the others wait for
                      log.py         output of the ranks that do not print to the console
                      preemption.py  signals that ask a run to stop

No file imports torch at its top. The names below are those that code in a rank needs. They import the
standard library alone, since a run listens to signals before it imports anything slower.
"""

from lptune.launch.hangs import hang_timeout_s
from lptune.launch.log import keep_log
from lptune.launch.outcome import LAUNCHER, hold

__all__ = ["LAUNCHER", "hang_timeout_s", "hold", "keep_log"]
