"""Keys of a config as lines of text, for `lptune keys` and `lptune run RECIPE --help`."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import lptune
from lptune.base.text import columns, wrapped
from lptune.cli import catalog, recipe
from lptune.config import RunConfig
from lptune.config.documented import Key, Section, keys, sections

_NO_SECTION = "top level"
_UNBREAKABLE = "\N{NO-BREAK SPACE}"  # no line ends at it, so `lr: 2e-05` stays together
_KINDS = Path(lptune.__file__).parent / "linear" / "kinds"


def configs() -> dict[str, type]:
    """Recipe -> config class, of the recipes of this installation."""
    return {name: recipe.config_class(path) for name, path in catalog.recipes().items()}


def exceptional() -> dict[str, list[str]]:
    """Key -> the recipes that have it, of keys that some recipe that trains lacks."""
    classes = configs()
    having = {name: {key.name for key in keys(cls)} for name, cls in classes.items()}
    training = {name for name, cls in classes.items() if issubclass(cls, RunConfig)}
    found = {key: [name for name in classes if key in having[name]] for key in set().union(*having.values())}
    return {key: names for key, names in found.items() if not training <= set(names)}


def section_lines(
    section: Section, only: Mapping[str, list[str]], width: int, *, whole: bool
) -> Iterator[str]:
    """A section and its keys. only: `exceptional()`. whole: not only the first sentence of each text."""
    title = section.text or "The keys without a section."
    yield from columns(section.name or _NO_SECTION, title, 14, width)
    # A column for the keys that are not exceptionally long.
    start = min(max((len(key.setting) for key in section.keys), default=0) + 4, width // 3)
    for key in section.keys:
        text = key.text if whole else first_sentence(key.text)
        notes = [key.values, *([f"only {', '.join(only[key.name])}"] if key.name in only else [])]
        yield from columns(f"  {key.setting}", f"{text} ({'; '.join(notes)})".strip(), start, width)


def key_lines(key: Key, only: Mapping[str, list[str]], width: int) -> Iterator[str]:
    """One key with all that is known of it. only: `exceptional()`."""
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


def overview_lines(cls: type, width: int) -> Iterator[str]:
    """Every key of a config class by section, each with its first sentence."""
    only = exceptional()
    for section in sections(cls):
        yield ""
        yield from section_lines(section, only, width, whole=False)


def compact_lines(cls: type, width: int) -> Iterator[str]:
    """Every key of a config class with its default, a paragraph for each section."""
    for section in sections(cls):
        settings = ", ".join(_setting(key) for key in section.keys)
        for line in columns(f"  {section.name or _NO_SECTION}", settings, 16, width):
            yield line.replace(_UNBREAKABLE, " ")


def first_sentence(text: str) -> str:
    """The beginning of `text` up to its first full stop."""
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
