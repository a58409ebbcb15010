"""The names of a run's checkpoints: `step-00000100` is the folder of the state after step 100."""

import re
from pathlib import Path


def step_folder_name(step: int) -> str:
    """The folder name of a checkpoint: `step-00000100` for 100."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder: 100 for `step-00000100`."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints of a run, newest first."""
    # [0-9], not isdigit: isdigit accepts the ² of step-², which int() refuses.
    found = [
        path for path in folder.glob("step-*") if re.fullmatch("[0-9]+", path.name[5:]) and path.is_dir()
    ]
    return sorted(found, key=step_of, reverse=True)
