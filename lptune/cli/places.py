"""Paths on the command line: checked as paths in a config are (lptune/config/checks.py), and whether a
command can make a folder or a file there.
"""

import os
from pathlib import Path
from typing import Any

import click

from lptune.base.errors import UserError
from lptune.base.files import kind_of
from lptune.config import check_path


class PathArgument(click.Path):
    """Converts an argument to a `Path` and expands `~`, which the shell does not do within quotes.

    Raises UserError for a path that cannot be opened or printed.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The argument as a checked `Path`."""
        check_path(param.get_error_hint(ctx).strip("'") if param else "path", os.fspath(value))
        return super().convert(os.path.expanduser(value), param, ctx)


def check_new_folder(dest: Path) -> None:
    """Raises UserError unless a finished folder can be renamed to `dest`, missing or an empty folder."""
    if dest.name in ("", ".."):
        raise UserError(
            f"{dest}: a finished folder is renamed into place, so give DEST a name, as in {dest / 'my-model'}"
        )
    try:
        if dest.is_symlink() or (dest.exists() and (not dest.is_dir() or any(dest.iterdir()))):
            raise UserError(f"{dest}: exists and is not an empty folder; choose another DEST")
        check_above(dest)
    except OSError as error:
        raise UserError(f"{dest}: cannot be read ({error.strerror}); choose another DEST") from None


def check_new_config(path: Path, option: str = "") -> None:
    """Raises UserError unless a new config can be written to `path`. option: what the message begins with."""
    check_above(path)
    if kind_of(path):
        raise UserError(f"{option}{path}: exists; choose another name, or remove it first")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{option}{path}: the name of a config ends in .yaml")


def check_above(dest: Path) -> None:
    """Raises UserError if anything above `dest` exists and is not a folder."""
    for above in reversed(dest.parents):
        if os.path.lexists(above) and not above.is_dir():
            raise UserError(f"{above}: is {kind_of(above)}, where a folder is needed")
