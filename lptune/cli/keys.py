"""`lptune keys`: which keys a config has, their types, defaults and meaning. Needs no torch.

The text is that of the dataclasses (lptune/config/documented.py), so the list cannot be out of date.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

import lptune
from lptune.base.errors import UserError, closest
from lptune.base.text import columns, text_width, wrapped
from lptune.cli import catalog, recipe
from lptune.config import RunConfig
from lptune.config.documented import Key, Section, keys, sections
from lptune.config.elsewhere import KEYS

_NO_SECTION = "top level"
_UNBREAKABLE = "\N{NO-BREAK SPACE}"  # no line ends at it, so `lr: 2e-05` stays together
_KINDS = Path(lptune.__file__).parent / "linear" / "kinds"


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
    yield from wrapped(intro, width)
    only = _exceptional()
    for section in sections(cls):
        yield ""
        yield from _section_lines(section, only, width, whole=False)


def _of_words(words: Sequence[str], cls: type, width: int) -> Iterator[str]:
    """The section or the keys with this name; else the keys that another trainer's word means; else the keys
    whose name or text has all the words.
    """
    name = " ".join(words)
    only = _exceptional()
    others = [other for other in _configs().values() if other is not cls]
    for each in (cls, *others):
        for section in sections(each):
            if section.name and section.name == name:
                yield from _section_lines(section, only, width, whole=True)
                return
    known = {key.name: key for each in (*reversed(others), cls) for key in keys(each)}  # cls wins
    own = {key.name for key in keys(cls)}
    if found := _named(name, known, own):
        yield from _in_full(found, only, width)
    elif name in KEYS:
        yield from wrapped(f"{name}, a key of other trainers: {KEYS[name]}", width)
        if KEYS[name] in known:
            yield from ("", *_key_lines(known[KEYS[name]], only, width))
    elif found := [key for key in known.values() if key.name in own and _has(key, words)] or [
        key for key in known.values() if _has(key, words)
    ]:
        yield from _in_full(found, only, width)
    else:
        names = {*known, *(key.leaf for key in known.values()), *(s.name for s in sections(cls))} - {""}
        hint = closest(name, names) or "; `lptune keys` lists all"
        raise UserError(f"keys: {name}: no section or key has this name, and no text this word{hint}")


def _named(name: str, known: dict[str, Key], own: set[str]) -> list[Key]:
    """The key with this dotted name, or the keys with this last part, those of the recipe before others."""
    if name in known:
        return [known[name]]
    found = [key for key in known.values() if key.leaf == name]
    return [key for key in found if key.name in own] or found


def _has(key: Key, words: Sequence[str]) -> bool:
    text = f"{key.name} {key.text}".lower()
    return all(word.lower() in text for word in words)


def _in_full(found: Sequence[Key], only: Mapping[str, list[str]], width: int) -> Iterator[str]:
    for number, key in enumerate(found):
        yield from ([""] * (number > 0))
        yield from _key_lines(key, only, width)


def _configs() -> dict[str, type]:
    """Recipe -> config class, of the recipes of this installation."""
    return {name: recipe.config_class(path) for name, path in catalog.recipes().items()}


def _exceptional() -> dict[str, list[str]]:
    """Key -> the recipes that have it, of keys that some recipe that trains lacks."""
    classes = _configs()
    having = {name: {key.name for key in keys(cls)} for name, cls in classes.items()}
    training = {name for name, cls in classes.items() if issubclass(cls, RunConfig)}
    found = {key: [name for name in classes if key in having[name]] for key in set().union(*having.values())}
    return {key: names for key, names in found.items() if not training <= set(names)}


def _section_lines(
    section: Section, only: Mapping[str, list[str]], width: int, *, whole: bool
) -> Iterator[str]:
    """A section and its keys. only: `_exceptional()`. whole: not only the first sentence of each text."""
    title = section.text or "The keys without a section."
    yield from columns(section.name or _NO_SECTION, title, 14, width)
    # A column for the keys that are not exceptionally long.
    start = min(max((len(key.setting) for key in section.keys), default=0) + 4, width // 3)
    for key in section.keys:
        text = key.text if whole else _first_sentence(key.text)
        notes = [key.values, *([f"only {', '.join(only[key.name])}"] if key.name in only else [])]
        yield from columns(f"  {key.setting}", f"{text} ({'; '.join(notes)})".strip(), start, width)


def _key_lines(key: Key, only: Mapping[str, list[str]], width: int) -> Iterator[str]:
    """One key with all that is known of it. only: `_exceptional()`."""
    yield f"{key.name}"
    yield from wrapped(key.text or "(its recipe says nothing about it)", width, 2)
    default = "required" if key.default is None else key.default
    yield f"  type     {key.values.removeprefix('required ')}"
    yield f"  default  {default}"
    if key.name == "precision.kind":
        yield "  choices"
        for kind in key.choices:
            yield from columns(f"    {kind}", _meaning(kind), 32, width)
    elif key.choices:
        yield from columns("  choices", ", ".join(key.choices), 11, width)
    if key.name in only:
        yield from columns("  only in", ", ".join(only[key.name]), 11, width)
    if key.entry:
        yield "  keys of an entry of the list"
        for each in key.entry:
            if each.text:
                yield from columns(f"    {each.setting}", f"{each.text} ({each.values})", 20, width)
        inherited = ", ".join(each.leaf for each in key.entry if not each.text)
        if inherited:
            yield from wrapped(f"{inherited}: as in `data`, for this source.", width, 4)


def compact_lines(cls: type, width: int) -> Iterator[str]:
    """Every key of a config class with its default, a paragraph for each section."""
    for section in sections(cls):
        settings = ", ".join(_setting(key) for key in section.keys)
        for line in columns(f"  {section.name or _NO_SECTION}", settings, 16, width):
            yield line.replace(_UNBREAKABLE, " ")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9`])", text, maxsplit=1)[0]


def _setting(key: Key) -> str:
    return f"{key.leaf}*" if key.default is None else key.setting.replace(" ", _UNBREAKABLE)


def _meaning(kind: str) -> str:
    """What a kind of precision is: the first line of its class, which is not imported: it needs torch."""
    if kind == "none":
        return "Everything runs in compute_dtype."
    for file in _KINDS.glob("*.py"):
        for each in ast.parse(file.read_text(encoding="utf-8")).body:
            text = ast.get_docstring(each) or "" if isinstance(each, ast.ClassDef) else ""
            if text.startswith(f"`{kind}`"):
                return re.sub(r"^`\w+`( \([^)]*\))?: ", "", text.splitlines()[0])
    return ""
