"""A recipe is a Python file with `def main(cfg: SomeConfig) -> None`.

The config class is read from that annotation with `ast`, since importing a recipe imports torch, and checking
a config must not. The recipe is imported only if `lptune.config` does not have the class (a copied recipe
with its own config).
"""

import ast
import atexit
import dataclasses
import gc
import importlib.util
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lptune.config
from lptune.base.errors import UnknownKeyError, UserError
from lptune.base.files import MEBI, read_text
from lptune.cli import catalog, tools

if TYPE_CHECKING:
    from lptune.training import PlannedStep

MAX_CHARS = 4 * MEBI  # far above any recipe or config


def config_class(path: Path) -> type[Any]:
    """The config class of the recipe at `path`: the annotation of `main`'s first parameter."""
    name = _annotation(path).rpartition(".")[2]
    found = getattr(lptune.config, name, None)
    if isinstance(found, type):
        return found
    hints = typing.get_type_hints(load_main(path))
    hints.pop("return", None)
    hint = next(iter(hints.values()), None)
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint):
        raise UserError(f"{path}: the annotation {name!r} of main's first parameter is not a config class")
    return hint


def split(config: str, arguments: Sequence[str]) -> tuple[Path, Path, Sequence[str]]:
    """The files of the recipe and of the config, and the overrides, of `[RECIPE] [key=value …]` after
    `--config`. Without RECIPE, the recipe is that of the config.
    """
    is_named = bool(arguments) and "=" not in arguments[0]
    path = catalog.find_config(config)
    recipe = catalog.find_recipe(arguments[0] if is_named else catalog.recipe_of(path))
    return recipe, path, arguments[is_named:]


def load(path: Path, config: Path, overrides: Sequence[str]) -> Any:
    """The config of the recipe at `path`: `load_config`, but for a key of another recipe the error names the
    recipe that has it, unless `config` says that it is of this one.
    """
    try:
        return lptune.config.load_config(config_class(path), config, overrides)
    except UnknownKeyError as error:
        migrate = tools.module("migrate.reading") if error.where == str(config) else None
        if migrate is not None and (tool := migrate.tool_of(config)):
            raise UserError(
                f"{config}: is a config of {tool}; `lptune migrate {config} --output my.yaml` makes one of "
                "lptune"
            ) from None
        if catalog.recipe_of(config, default="") == path.stem:
            raise  # the config is of this recipe: the key is wrong, not the recipe
        if name := _recipe_with(error.key, path, config):
            meant = f" (did you mean {error.similar!r}?)" if error.similar else ""
            raise UserError(
                f"{error.where}: {path.stem} has no key {error.key!r}{meant}, and the recipe {name} has it; "
                f"name the recipe: {name} --config {config}"
            ) from None
        raise


def _recipe_with(key: str, path: Path, config: Path) -> str | None:
    """Name of a recipe other than that at `path` that has the key, first of all that of `config`; None: no
    recipe has it.
    """
    names = sorted(catalog.recipes(), key=lambda name: name != catalog.recipe_of(config))
    others = ((name, catalog.recipes()[name]) for name in names)
    return next(
        (
            name
            for name, other in others
            if other != path and key in lptune.config.key_paths(config_class(other))
        ),
        None,
    )


def load_main(path: Path) -> Callable[[Any], object]:
    """Import the recipe at `path` and return its `main`. Modules beside the file can be imported, too."""
    main: Callable[[Any], object] = _load(path).main
    return main


def planned_step(path: Path, cfg: Any) -> "PlannedStep | None":
    """What the recipe at `path` says of its step with the config `cfg`; None: it trains nothing. Imports
    it.
    """
    from lptune.training import PlannedStep

    offered = getattr(_load(path), "planned_step", None)
    found: PlannedStep | None = PlannedStep() if offered is None else offered(cfg)
    return found


def _load(path: Path) -> Any:
    name = f"lptune_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)  # noqa: TID251  (what the user runs)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: is not a Python file; a recipe ends in .py")
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # last: its modules hide none of Python's
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look a class's module up there
    # The modules that a recipe imports, torch above all, live to the end. Collecting garbage among them again
    # and again, and once more at exit, was half of the time to an error message (3.9 s; without it 1.9 s).
    gc.disable()
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        # Of what the recipe itself imports. An import within lptune that fails is a bug, with its traceback.
        place = traceback.extract_tb(error.__traceback__)[-1]
        if place.filename != module.__file__ or (error.name or "").partition(".")[0] != "lptune":
            raise
        raise UserError(
            f"{path}: line {place.lineno}: {error.msg.partition(' (')[0]}; if it is a copy from another "
            "version of lptune, make a new one with `lptune cp` and repeat your changes there"
        ) from None
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(_thaw_for_triton)
    return module


def _thaw_for_triton() -> None:
    """At exit, the bindings of Triton 3.8 and newer report all objects that the collector has not freed as
    leaks. The collector frees neither frozen objects nor objects that those refer to.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def _annotation(path: Path) -> str:
    """The first parameter's annotation of `main` as written, e.g. `config.FinetuneConfig`."""
    try:
        tree = ast.parse(read_text(path, MAX_CHARS))
    except SyntaxError as error:
        raise UserError(f"{path}: line {error.lineno}: not valid Python: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not a Python file: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            parameters = [*node.args.posonlyargs, *node.args.args]
            if not parameters or parameters[0].annotation is None:
                raise UserError(
                    f"{path}: line {node.lineno}: annotate main's parameter: main(cfg: FinetuneConfig)"
                )
            annotation = parameters[0].annotation
            return str(annotation.value) if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    raise UserError(f"{path}: is not a recipe: it has no function `main(cfg: FinetuneConfig)`")
