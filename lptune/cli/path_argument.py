"""Paths on the command line, by the rule of those in a config (lptune/config/checks.py)."""

import os
from pathlib import Path
from typing import Any

import click

from lptune.config import check_path


class PathArgument(click.Path):
    """A path, as a `Path`. Expands `~` itself, since a quoted one reaches us unexpanded.

    Raises UserError for a path that cannot be opened or printed.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        check_path(param.get_error_hint(ctx).strip("'") if param else "path", os.fspath(value))
        return super().convert(os.path.expanduser(value), param, ctx)
