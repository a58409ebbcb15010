"""HTML and SVG from Python values, in which no text can become markup.

Every string of a run may be hostile: a sample of the model, the name of a folder, a key of the config. So
markup is not written by templates, where each place must remember to escape. `tag` makes an element, and
escapes every child and attribute that is not `Html`; only `tag` and `join` make `Html`.

    tag("p", "1 < 2", klass="note")  ->  Html('<p class="note">1 &lt; 2</p>')

Characters that control a terminal, or turn the direction of what follows, appear as escapes (`\\x1b`).
"""

import html
import unicodedata
from collections.abc import Iterable

_VOID = {"meta", "input", "br", "link", "col"}
_HARMLESS = "\n\t\u200c\u200d\u00ad"  # joiners, of which scripts and emoji are made, and the soft hyphen
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Iterable[str] | None


def tag(name: str, *children: Child, klass: str = "", **attributes: str | float | bool | None) -> Html:
    """The element `name`. children: text to be escaped, `Html`, or iterables of these; None is left out.

    klass: the attribute class. attributes: `_` in a name stands for `-`; True writes the name alone, None and
    False nothing.
    """
    parts = [f"<{name}"]
    if klass:
        attributes = {"class": klass, **attributes}
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{_attribute(value)}"')
    parts.append(">")
    if name in _VOID:
        return Html("".join(parts))
    parts.append(join(*children))
    parts.append(f"</{name}>")
    return Html("".join(parts))


def join(*children: Child) -> Html:
    """The children one after the other, each escaped unless it is `Html`."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(html.escape(shown(child), quote=False))
        elif child is not None:
            parts.append(join(*child))
    return Html("".join(parts))


def heads(texts: Iterable[Child], klass: str = "") -> list[Html]:
    """Heads of the columns of a table."""
    return [tag("th", text, scope="col", klass=klass) for text in texts]


def table(label: str, heads: Iterable[Html], rows: Iterable[Html]) -> Html:
    """A table that scrolls by itself where the screen is narrower, also by keys. label: what it is, for those
    who do not see it.
    """
    inner = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows))
    return tag("div", inner, klass="wide", role="region", aria_label=label, tabindex="0")


def soft(text: str) -> Html | None:
    """A paragraph in a soft colour; None without text."""
    return tag("p", text, klass="soft") if text else None


def shown(text: str, max_chars: int | None = None) -> str:
    """`text` with escapes for characters that control, hide or reorder, cut after `max_chars`."""
    if max_chars is not None and len(text) > max_chars:
        text = f"{text[: max_chars - 1]}…"
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode()
        if c not in _HARMLESS and unicodedata.category(c) in _HIDDEN
        else c
        for c in text
    )


def _attribute(value: str | float) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return html.escape(shown(text), quote=True)
