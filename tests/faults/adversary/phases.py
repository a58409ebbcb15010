"""Moments of a run: a copy of the recipe that waits at each of them, if it is asked to.

A case names a phase; when the run comes to it, it says so and waits for the adversary.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, PHASE = "ADVERSARY_FOLDER", "ADVERSARY_PHASE"
_RECIPE = Path(__file__).parents[3] / "recipes" / "full_finetune.py"
_TIMEOUT_S = 60.0

# Name -> (a line of the recipe, whether the run waits after it); None: `around`.
PHASES: dict[str, tuple[str, bool] | None] = {
    "opened": (r"training\.check_settings\(.*\)", False),
    "tokenized": (r"steps = training\.plan_steps\(.*\)", False),
    "loaded": (r"steps\.start\(state\)", False),
    "created": (r"steps\.start\(state\)", True),
    "listening": (r"for batch in step\.shadow_batches\(\):", False),
    "in the first step": (r"step\.update\(\).*", False),
    "before the save": None,
    "after the save": None,
    "before the export": (r"run\.export\(base\)", False),
    "after the export": (r"run\.export\(base\)", True),
}


def write_recipe(path: Path) -> Path:
    """The copy, at `path`."""
    text = _RECIPE.read_text(encoding="utf-8")
    for name, place in PHASES.items():
        if place is None:
            continue
        line, is_after = place
        ours = f'phases.reach("{name}")'
        new = rf"\1\2\n\1{ours}\n" if is_after else rf"\1{ours}\n\1\2\n"
        text, count = re.subn(rf"^( *)({line})\n", new, text, flags=re.MULTILINE)
        assert count == 1, f"{count} lines of the recipe match {line}"
    text = text.replace("\nimport torch\n", "\nfrom tests.faults.adversary import phases\nimport torch\n", 1)
    text += "\n\ncheckpoint.RunWriter.save = phases.around(checkpoint.RunWriter.save)\n"
    path.write_text(text, encoding="utf-8")
    return path


def around(save: Callable[..., None]) -> Callable[..., None]:
    """`save`, with a phase before and after it."""

    def saved(*args: Any, **keys: Any) -> None:
        reach("before the save")
        save(*args, **keys)
        reach("after the save")

    return saved


def reach(name: str) -> None:
    """Called by the recipe: waits here once, if this is the phase that was asked for."""
    if os.environ.get(PHASE) != name:
        return
    del os.environ[PHASE]
    folder = Path(os.environ[FOLDER])
    (folder / "reached").touch()
    _wait_for(folder / "go")


def has_come(folder: Path, pid: int, to: str = "reached") -> bool:
    """Called by the adversary: waits until the process has come to its phase; False where it ended before.

    to: `started` is before the first line of the command.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while not (folder / to).exists():
        if time.monotonic() > deadline or not _runs(pid):
            return False
        time.sleep(0.005)
    return True


def go_on(folder: Path) -> None:
    """Lets the run go on."""
    (folder / "go").touch()


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
