"""Finds recipes and configs by listing two folders; there is no registry to keep up to date.

In a source checkout (and an editable install) they are `recipes/` and `configs/` beside the package; a wheel
carries the same two folders as `lptune/_bundled/`. A recipe's name is its file's stem (`full_finetune`); a
config's name is its path below `configs/` without the suffix (`llama3_2/1b`). A path is accepted wherever a
name is.
"""

import ast
import re
import textwrap
from pathlib import Path

import lptune
from lptune.base.errors import UserError, closest
from lptune.base.files import MEBI, kind_of, read_text
from lptune.config import check_path

DEFAULT_RECIPE = "full_finetune"
_PACKAGE = Path(lptune.__file__).parent
# With limits, because `.*` would take hours to search one long line: quadratic in its length.
_COMMAND = re.compile(r"^#.{0,200}\blptune run (?:.{0,400} )?(\w{1,100}) --config ", re.MULTILINE)


def folder(kind: str) -> Path:
    """The folder of `kind` ("recipes" or "configs") of this installation."""
    bundled = _PACKAGE / "_bundled" / kind
    return bundled if bundled.is_dir() else _PACKAGE.parent / kind


def recipes() -> dict[str, Path]:
    """Name -> file of every recipe, sorted by name."""
    files = folder("recipes").glob("*.py")
    return {file.stem: file for file in sorted(files) if not file.name.startswith("_")}


def configs() -> dict[str, Path]:
    """Name -> file of every config, sorted by name."""
    root = folder("configs")
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe, given by name or path."""
    return _find("recipe", name, recipes(), ".py")


def find_config(name: str) -> Path:
    """The file of a config, given by name or path."""
    return _find("config", name, configs(), ".yaml")


def is_config(name: str) -> bool:
    """Whether `name` is the name or path of a config, not of a recipe and not `key=value`."""
    return name in configs() or ("=" not in name and Path(name).suffix in (".yaml", ".yml"))


def recipe_of(config: Path, default: str = DEFAULT_RECIPE) -> str:
    """The recipe that a config is for: that of the first `lptune run RECIPE --config …` in its comments, if
    this installation has it; else `default`.
    """
    try:
        text = read_text(config, 4 * MEBI)
    except (OSError, ValueError):  # reported where the config is loaded
        return default
    found = _COMMAND.search(text)
    return found[1] if found and found[1] in recipes() else default


def find_any(name: str) -> Path:
    """The file of a recipe or config, given by name."""
    if name in configs() and name in recipes():
        raise UserError(
            f"{name}: is a recipe and a config; give the path: {recipes()[name]} or {configs()[name]}"
        )
    return _find("recipe or config", name, {**configs(), **recipes()}, ".py")


def summary(recipe: Path) -> str:
    """The first line of a recipe's docstring, read without running the recipe."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else ""


def comment(config: Path) -> str:
    """The first sentence of the comment with which a config begins, in at most 110 characters; empty if it
    begins with none.
    """
    paragraph = list[str]()
    with config.open(encoding="utf-8") as file:
        for line in file:
            if not line.startswith("#") or not (text := line.strip("# \n")):
                break
            paragraph.append(text)
    sentence = " ".join(paragraph).partition(". ")[0].removesuffix(".")
    return textwrap.shorten(sentence, 110, placeholder=" …")


def _find(kind: str, name: str, known: dict[str, Path], suffix: str) -> Path:
    if name in known:
        return known[name]
    check_path(kind, name)
    path = Path(name).expanduser()
    other = {"recipe": "config", "config": "recipe"}.get(kind, "")
    if (other == "config" and is_config(name)) or (
        other == "recipe" and (name in recipes() or path.suffix == ".py")
    ):
        raise UserError(f"{name}: is a {other}; give the name or the path of a {kind}")
    try:
        found = kind_of(path, follow=True)
    except OSError as error:  # a folder above it cannot be searched, or a circle of links
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None
    if found == "a file":
        return path
    if found:
        raise UserError(f"{name}: is {found}; give the name or the path of a {kind}")
    # The hint for a path is the name that it probably means: `recipes/full_finetun.py` -> full_finetune.
    hint = closest(name, known) or closest(name.removesuffix(suffix).split("configs/")[-1], known)
    hint = hint or closest(path.stem, known) or "; `lptune ls` shows what there is"
    raise UserError(f"{name}: no such {kind}{hint}")
