"""The `lptune` command: one file per subcommand, nothing heavy imported before a command needs it.

A run imports this before anything else, and listens to signals from here on (lptune/ranks/preemption.py).
"""

import os
import sys

from lptune.ranks import preemption

# While Python looks for the module of `python -m lptune.cli.main`, its name is not yet in sys.argv.
if sys.argv[1:2] == ["run"] and os.path.basename(sys.argv[0]) in ("-m", "lptune"):
    preemption.listen()
