"""The tools in lptune/tools: commands that ask about runs and machines, and are not needed to train.

A folder NAME there with a command.py is the command `lptune NAME`, and the first line of command.py describes
it in the list of commands. Commands are found by listing the folder, and imported when they are called.
lptune works without the folder: nothing outside it imports it, but by name here.
"""

import importlib
from pathlib import Path
from typing import Any

import click

import lptune

FOLDER = Path(lptune.__file__).parent / "tools"


def commands() -> dict[str, str]:
    """The description of each command, by its name."""
    found = {}
    for file in sorted(FOLDER.glob("*/command.py")):
        with file.open(encoding="utf-8") as text:
            found[file.parent.name] = text.readline().strip('". \n')
    return found


def command(name: str) -> click.Command:
    """The command of that name, one of `commands()`."""
    found: click.Command = getattr(module(f"{name}.command"), name)
    return found


def module(name: str) -> Any:
    """The module lptune.tools.NAME, such as `report.closing`; None where it is not there."""
    file = FOLDER.joinpath(*name.split(".")).with_suffix(".py")
    return importlib.import_module(f"lptune.tools.{name}") if file.is_file() else None  # noqa: TID251  (listed)
