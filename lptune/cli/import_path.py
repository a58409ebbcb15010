"""Where the modules of a run come from, the same for one rank and for many.

From the installation, from PYTHONPATH, and last from the folder of the recipe (`add`). Never from the current
directory: `python -m` puts it first, and a `random.py` beside the data would take the place of Python's. Of
`python -m lptune` Python itself imports the package and `pkgutil` before anything here can act; `lptune` and
`python -P -m lptune` have no such gap.
"""

import os
import sys


def is_program() -> bool:
    """Whether this process is the command line, rather than a program that imports it.

    sys.argv does not tell: while Python looks for the module of `-m`, its name is not there, and a worker
    that multiprocessing has spawned has a copy of its parent's.
    """
    name = "".join(sys.orig_argv[-len(sys.argv) :][:1]).removeprefix("-m")
    return os.path.basename(name) in ("lptune", "lptune.cli.main")


def leave_out_current_folder() -> None:
    """Takes away what Python has put first (`-m`: the current directory; the script `lptune`: its own), here
    and for each Python that this process starts: ranks, compile workers, their resource trackers.
    """
    try:
        folders = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    except OSError:  # the current directory was removed, and Python has put nothing
        folders = set()
    if not sys.flags.safe_path and sys.path[0] in folders:
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def add(folder: str) -> None:
    """Lets modules in `folder` be found where no other of their name is."""
    if folder not in sys.path:
        sys.path.append(folder)
