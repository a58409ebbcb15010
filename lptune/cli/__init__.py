"""The `lptune` command: one file per subcommand, nothing heavy imported before a command needs it.

A run imports this before anything else, and listens to signals from here on (lptune/ranks/preemption.py).
"""

import os
import sys

from lptune.ranks import preemption

# While Python looks for the module of `python -m lptune.cli.main`, its name is not yet in sys.argv. A worker
# that a run has spawned gets the same sys.argv, and must go on ignoring signals.
is_run = sys.argv[1:2] == ["run"] and os.path.basename(sys.argv[0]) in ("-m", "lptune")
if is_run and "multiprocessing.spawn" not in sys.modules:
    preemption.listen()
