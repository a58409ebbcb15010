"""Where the modules of a run are imported from; the same for one rank and for many.

They come from the installation, from PYTHONPATH, and last from the folder of the recipe (`add`). They never
come from the current directory: `python -m` puts it first, and a `random.py` beside the data would replace
Python's. With `python -m lptune`, Python imports the package and what `-m` needs before this code runs;
`lptune` and `python -P -m lptune` do not have that gap.
"""

import os
import sys


def is_program() -> bool:
    """Whether this process is the `lptune` command, not a program that imports lptune.

    sys.argv cannot tell: it lacks the name while Python looks for the module of `-m`, and a worker that
    multiprocessing spawns has a copy of its parent's argv.
    """
    name = "".join(sys.orig_argv[-len(sys.argv) :][:1]).removeprefix("-m")
    return os.path.basename(name) in ("lptune", "lptune.cli.main")


def leave_out_current_folder() -> None:
    """Removes the folder that Python puts first on sys.path (`-m`: the current directory; the script
    `lptune`: its own), here and in each Python that this process starts: ranks, compile workers, resource
    trackers.
    """
    try:
        folders = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    except OSError:  # the current directory was removed: Python added none
        folders = set()
    if not sys.flags.safe_path and sys.path[0] in folders:
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def add(folder: str) -> None:
    """Appends `folder` to the places of modules: its modules are found if no other has the same name."""
    if folder not in sys.path:
        sys.path.append(folder)
