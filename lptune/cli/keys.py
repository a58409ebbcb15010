"""`lptune keys`: which keys a config has, their types, defaults and meaning. Needs no torch.

The text is that of the dataclasses (lptune/config/documented.py), so the list cannot be out of date.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from lptune.base.errors import UserError, closest
from lptune.base.text import text_width, wrapped
from lptune.cli import catalog, recipe
from lptune.config.elsewhere import KEYS

if TYPE_CHECKING:
    from lptune.config.documented import Key


@click.command("keys")
@click.argument("words", nargs=-1, metavar="[SECTION|KEY|WORD …]")
@click.option(
    "--recipe",
    "recipe_name",
    metavar="RECIPE",
    default=catalog.DEFAULT_RECIPE,
    show_default=True,
    help="Recipe (a name or a path) whose keys are listed.",
)
def keys_command(words: tuple[str, ...], recipe_name: str) -> None:
    """List the keys of a config: defaults, types and meaning.

    `lptune keys` lists all keys of a recipe, `lptune keys precision` a section with its whole text, `lptune
    keys precision.kind` one key with its choices. Other words are searched in names and text: `lptune keys
    clip` finds max_grad_norm.
    """
    cls = recipe.config_class(catalog.find_recipe(recipe_name))
    width = text_width()
    lines = list(_of_words(words, cls, width) if words else _all(recipe_name, cls, width))
    click.echo("\n".join(lines))


def _all(name: str, cls: type, width: int) -> Iterator[str]:
    intro = (
        f"Keys of {name}, with defaults. In a file they stand in sections (`optimizer: {{lr: 1e-5}}`), on "
        "the command line with dots (`optimizer.lr=1e-5`). `lptune keys SECTION` and `lptune keys KEY` say "
        "more."
    )
    from lptune.cli import key_text

    yield from wrapped(intro, width)
    yield from key_text.overview_lines(cls, width)


def _of_words(words: Sequence[str], cls: type, width: int) -> Iterator[str]:
    """The section or the keys with this name; else the keys that another trainer's word means; else the keys
    whose name or text has all the words.
    """
    from lptune.cli import key_text
    from lptune.config.documented import keys, sections

    name = " ".join(words)
    only = key_text.exceptional()
    others = [other for other in key_text.configs().values() if other is not cls]
    for each in (cls, *others):
        for section in sections(each):
            if section.name and section.name == name:
                yield from key_text.section_lines(section, only, width, whole=True)
                return
    known = {key.name: key for each in (*reversed(others), cls) for key in keys(each)}  # cls wins
    own = {key.name for key in keys(cls)}
    if found := _named(name, known, own):
        yield from _in_full(found, only, width)
    elif name in KEYS:
        yield from wrapped(f"{name}, a key of other trainers: {KEYS[name]}", width)
        if KEYS[name] in known:
            yield from ("", *key_text.key_lines(known[KEYS[name]], only, width))
    elif found := [key for key in known.values() if key.name in own and _has(key, words)] or [
        key for key in known.values() if _has(key, words)
    ]:
        yield from _in_full(found, only, width)
    else:
        names = {*known, *(key.leaf for key in known.values()), *(s.name for s in sections(cls))} - {""}
        hint = closest(name, names) or "; `lptune keys` lists all"
        raise UserError(f"keys: {name}: no section or key has this name, and no text this word{hint}")


def _named(name: str, known: "dict[str, Key]", own: set[str]) -> "list[Key]":
    """The key with this dotted name, or the keys with this last part, those of the recipe before others."""
    if name in known:
        return [known[name]]
    found = [key for key in known.values() if key.leaf == name]
    return [key for key in found if key.name in own] or found


def _has(key: "Key", words: Sequence[str]) -> bool:
    text = f"{key.name} {key.text}".lower()
    return all(word.lower() in text for word in words)


def _in_full(found: "Sequence[Key]", only: Mapping[str, list[str]], width: int) -> Iterator[str]:
    from lptune.cli import key_text

    for number, key in enumerate(found):
        yield from ([""] * (number > 0))
        yield from key_text.key_lines(key, only, width)
