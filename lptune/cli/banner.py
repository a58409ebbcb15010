"""The first lines of a run: what it will do, printed before torch is imported.

The import takes one to two seconds on an idle machine, and half a minute where the installation lies on a
slow network disk.
"""

import hashlib
import os
import textwrap
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lptune.base import progress
from lptune.base.files import read_object
from lptune.config import RunConfig

_PRINTED = "LPTUNE_BANNER_PRINTED"  # in the environment of the ranks of a launcher that has printed it
_WIDTH = 80


def show(cfg: object, recipe: str, config: str) -> None:
    """Prints the banner once for a launch: on rank 0, unless its launcher has printed it. Only a run that
    trains has one: the output of `generate` is the answers alone.

    recipe, config: as the user named them.
    """
    if isinstance(cfg, RunConfig) and _is_main() and _PRINTED not in os.environ:
        progress.print_line("\n".join(lines(cfg, recipe, config)))


def show_in_launcher(cfg: object, recipe: str, config: str) -> None:
    """As `show`, in the launcher of a run on one machine; its ranks then print none."""
    show(cfg, recipe, config)
    os.environ[_PRINTED] = "1"


def note_other_recipe(cfg: object, file: Path) -> None:
    """Prints a note on rank 0 if output_dir has a run of another recipe than `file`, or of another version of
    it. The run may go on with it, or be finished already, so the user has to know.
    """
    if not isinstance(cfg, RunConfig) or not _is_main():
        return
    folder = Path(cfg.output_dir).expanduser()
    about: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        about = read_object(folder / "run.json", missing={}, follow=False)
    if not isinstance(before := about.get("recipe_sha256"), str):
        return
    if before != hashlib.sha256(file.read_bytes()).hexdigest():
        name = str(about.get("recipe"))
        what = "another recipe" if name != file.stem else "another version of this recipe"
        progress.print_line(f"note: {folder} was begun with {what} ({name}, sha256 {before:.8})")


def phase(cfg: object, what: str) -> AbstractContextManager[object]:
    """`progress.phase` on rank 0 of a run that trains. Other runs show `what` on a terminal, until the block
    ends.
    """
    if not _is_main():
        return nullcontext()
    return progress.phase(what) if isinstance(cfg, RunConfig) else progress.in_place(f"{what} ...")


def lines(cfg: RunConfig, recipe: str, config: str) -> list[str]:
    """The banner: five lines, of at most 80 columns unless a name is longer."""
    kind = cfg.precision.kind
    names = ", ".join(entry.source for entry in cfg.data.sources)
    facts = {
        "recipe": f"{recipe}, config {config}",
        "model": cfg.model.path,
        "data": textwrap.shorten(names, _WIDTH - 11, placeholder=" ...") if ", " in names else names,
        "precision": cfg.compute_dtype if kind == "none" else f"{kind}, the rest in {cfg.compute_dtype}",
        "output": cfg.output_dir,
    }
    return [f"{name:<9}  {fact}" for name, fact in facts.items()]


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
