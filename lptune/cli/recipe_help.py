"""`lptune run RECIPE --help`: what a recipe does, how it is run, and its keys. Needs no torch.

`lptune run --help` is the help of the command. A copied recipe with a config class of its own is imported,
since only Python can tell its keys.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from lptune.base.errors import UserError
from lptune.base.files import read_text
from lptune.base.text import columns, text_width, wrapped
from lptune.cli import catalog, keys, recipe

_HELP = ("-h", "--help")
_MORE = {
    "continued_pretrain": "docs/pretraining.md",
    "distill": "docs/distillation.md",
    "evaluate": "docs/evaluation.md",
    "full_dpo": "docs/preferences.md",
    "full_kto": "docs/preferences.md",
    "generate": "docs/generate.md",
    "precompute_logits": "docs/distillation.md",
}


class RunCommand(click.Command):
    """`lptune run`, with the help of a recipe where one is named before `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Prints the help of the recipe and ends, if there is one and `--help` is asked for."""
        if not ctx.resilient_parsing and any(arg in _HELP for arg in args) and (name := _recipe_in(args)):
            click.echo("\n".join(_lines(name, text_width())))
            ctx.exit()
        return super().parse_args(ctx, args)


def _recipe_in(args: list[str]) -> str | None:
    """The recipe that the arguments name; None if they name none. torchrun's flags may stand before it."""
    for arg in args:
        if arg in catalog.recipes() or (arg.endswith(".py") and not arg.startswith("-")):
            return arg
    first = args[0]
    if first.startswith("-"):
        return None
    catalog.find_recipe(first)  # raises: there is no such recipe
    return first


def _lines(name: str, width: int) -> Iterator[str]:
    path = catalog.find_recipe(name)
    yield f"Usage: lptune run [OPTIONS] {name} --config CONFIG [key=value …]"
    yield ""
    yield from _docstring(path, width)
    if names := [each for each, file in catalog.configs().items() if catalog.recipe_of(file) == path.stem]:
        yield from ("", "Configs:", *wrapped(", ".join(names), width, 2))
    yield from ("", "Keys and their defaults (* required); `null`: not set:")
    yield from keys.compact_lines(recipe.config_class(path), width)
    yield from ("", "More:")
    more = {
        f"lptune keys --recipe {name}": "what each key means",
        f"lptune cat {name}" if name in catalog.recipes() else f"cat {name}": "the whole job, in one file",
        "lptune run --help": "options: ranks, machines",
        _MORE.get(name, "docs/recipes.md"): "the page of the documentation",
    }
    for what, why in more.items():
        yield from columns(f"  {what}", why, max(map(len, more)) + 4, width)


def _docstring(path: Path, width: int) -> Iterator[str]:
    """The docstring of a recipe, its paragraphs in lines of `width`; indented lines (commands) stay."""
    try:
        text = ast.get_docstring(ast.parse(read_text(path, recipe.MAX_CHARS))) or ""
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path}: is not a Python file: {error}") from None
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        yield from ([""] * (number > 0))
        if paragraph.startswith(" "):
            for line in paragraph.splitlines():
                yield from _command_lines(line, width)
        else:
            yield from wrapped(paragraph, width)


def _command_lines(line: str, width: int) -> list[str]:
    """A command of an indented line, continued on a further line where it is longer than `width`."""
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip())
    first, *rest = wrapped(line.strip(), width - indent - 4)
    parts = [f"{' ' * indent}{first}", *(f"{' ' * (indent + 2)}{part}" for part in rest)]
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:]
