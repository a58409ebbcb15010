"""Paths on the command line, with the same checks as paths in a config (lptune/config/checks.py)."""

import os
from pathlib import Path
from typing import Any

import click

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
