"""The `lptune` command: one file per subcommand, nothing heavy imported before a command needs it.

A run imports this before anything else, and listens to signals from here on (lptune/ranks/preemption.py).
"""

import sys

from lptune.cli import import_path

if import_path.is_program():
    from lptune.cli import interrupts  # first of all: Python's own reaction to Ctrl-C is a traceback

    interrupts.listen()
    import_path.leave_out_current_folder()
    from lptune.ranks import preemption, streams  # not above: they import more of Python's modules

    _command = sys.argv[1:2]
    _is_run = _command == ["run"]
    if _is_run:
        preemption.listen()
    from lptune.config import printable  # takes a while: the signals come first

    # A recipe may print colours; what the other commands print is text, some of it of strangers' files.
    _works = _is_run or _command in (["export"], ["download"], ["new-checkpoint"], ["cp"])
    streams.guard(ends_command=not _works, escape=str if _is_run else printable)
