"""The `lptune` command: one file per subcommand, nothing heavy imported before a command needs it.

A run imports this package first, and listens to signals from then on (lptune/launch/preemption.py).
"""

import sys

# Whether this is the command, not a program that imports lptune. sys.argv cannot tell: it lacks the name
# while Python looks for the module of `-m`, and a worker of multiprocessing has its parent's argv.
_program = "".join(sys.orig_argv[-len(sys.argv) :][:1]).removeprefix("-m").rpartition("/")[2]
if _program in ("lptune", "lptune.cli.main"):
    from lptune.cli import interrupts  # before any other import: Python reacts to Ctrl-C by a traceback

    interrupts.listen()
    from lptune.cli import streams  # not above: it and `launch` import more standard modules
    from lptune.launch import preemption

    _command = sys.argv[1:2]
    _is_run = _command == ["run"]
    if _is_run:
        preemption.listen()
    from lptune.base.text import printable  # slow to import, so after the signals

    # Commands that do more than print. The answer of `verify` and `validate` is also their exit code.
    _works = _is_run or not {
        *("cp", "download", "export", "new-checkpoint", "report", "sweep", "validate", "verify")
    }.isdisjoint(_command)
    # Without --output, what `migrate` prints is the config, which must not be cut without an error.
    _works |= _command == ["migrate"] and any(each.startswith("--output") for each in sys.argv)
    # A recipe and `data` may print colours, and `data` escapes what it prints by itself. Other commands print
    # text, some of it from files of other people.
    _colours = _is_run or _command == ["data"]
    streams.guard(ends_command=not _works, escape=str if _colours else printable)
