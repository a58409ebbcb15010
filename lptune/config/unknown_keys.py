"""Keys that a config does not have, each reported with the key that was probably meant."""

import dataclasses
import typing
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from lptune.base.errors import UnknownKeyError, closest
from lptune.config.elsewhere import key_here

_MAX_LISTED = 10
"""Number of keys that a message names."""


def check_keys(cls: type, paths: Sequence[str], values: DictConfig, where: str) -> None:
    """Raises UnknownKeyError for the first key of `values` that the config class `cls` lacks.

    paths: every key of `cls`, dotted. where: the file or the argument, for the message.
    """
    for prefix, key, section in _unknown_keys(cls, values, ""):
        known = [field.name for field in dataclasses.fields(section)]
        sections = {path.rpartition(".")[0] for path in paths} - {""}
        everywhere = {path.rpartition(".")[2]: path for path in paths}
        hint = key_here(prefix + key, sections)
        if key in paths:
            hint = f"; write it nested, {key.replace('.', ': {')}: …{'}' * key.count('.')}"
        elif not hint and key in everywhere and "." in everywhere[key]:  # right word, wrong section
            hint = f" (did you mean {everywhere[key]!r}?)"
        elif not hint:
            hint = closest(key, known).replace("'", f"'{prefix}", 1)
        if not hint and not prefix and (leaf := _leaf(values, key)):
            # A section of another recipe: `data.source` of generate is prompts.source.
            similar = everywhere.get(leaf.rpartition(".")[2])
            hint = f" (did you mean {similar!r}?)" if similar else _listed(known, prefix)
            raise UnknownKeyError(where, leaf if similar else key, hint, leaf=leaf, similar=similar)
        raise UnknownKeyError(where, prefix + key, hint or _listed(known, prefix))


def _listed(known: Sequence[str], prefix: str) -> str:
    """The keys of a section, or the first of many and where the others are."""
    if len(known) <= _MAX_LISTED:
        return f"; known: {', '.join(known)}"
    command = f"lptune keys {prefix.rstrip('.')}".strip()
    return f"; known: {', '.join(known[:_MAX_LISTED])}, …: `{command}` lists all"


def _leaf(values: DictConfig, key: str) -> str | None:
    """`key` with the first key below it, dotted; None if its value is no section."""
    child = values._get_node(key)
    names = list(child) if isinstance(child, DictConfig) and not child._is_none() else []
    return f"{key}.{names[0]}" if names else None


def _unknown_keys(cls: type, values: DictConfig, prefix: str) -> Iterator[tuple[str, str, type]]:
    """(prefix, key, dataclass) of each key that the dataclass of its section lacks."""
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            yield prefix, str(key), cls
        elif dataclasses.is_dataclass(hints[str(key)]):
            child = values._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
                yield from _unknown_keys(typing.cast(type, hints[str(key)]), child, f"{prefix}{key}.")
