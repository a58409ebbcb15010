"""Checks of the place where a command makes a folder."""

import os
from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.files import kind_of


def check_new_folder(dest: Path) -> None:
    """Raises UserError unless a finished folder can be renamed to `dest`, missing or an empty folder."""
    if dest.name in ("", ".."):
        raise UserError(
            f"{dest}: a finished folder is renamed into place, so give DEST a name, as in {dest / 'my-model'}"
        )
    try:
        if dest.is_symlink() or (dest.exists() and (not dest.is_dir() or any(dest.iterdir()))):
            raise UserError(f"{dest}: exists and is not an empty folder; choose another DEST")
        for above in reversed(dest.parents):
            # A folder that does not exist yet has no `..`.
            if above.name == ".." and not above.parent.is_dir():
                raise UserError(f"{above.parent}: no such folder; make it, or write DEST without it")
        check_above(dest)
    except OSError as error:
        raise UserError(f"{dest}: cannot be read ({error.strerror}); choose another DEST") from None
    check_outside_checkpoints(dest)


def check_above(dest: Path) -> None:
    """Raises UserError if anything above `dest` exists and is not a folder."""
    for above in reversed(dest.parents):
        if os.path.lexists(above) and not above.is_dir():
            raise UserError(f"{above}: is {kind_of(above)}, where a folder is needed")


def check_outside_checkpoints(dest: Path, option: str = "DEST") -> None:
    """Raises UserError for a place among a run's checkpoints: it would be taken for one, or a part of one."""
    real = Path(os.path.realpath(dest))
    for place in (real, *real.parents):
        if place.parent.name == "checkpoints" and any(place.parent.glob("step-*/manifest.json")):
            raise UserError(
                f"{dest}: is among the checkpoints of a run, {place.parent}; choose another {option}"
            )
