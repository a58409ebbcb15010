"""Data sets of the old file as sources of data: what torchtune, axolotl and TRL have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from lptune.tools.migrate.draft import NOT_NEEDED, NOT_OFFERED, OFF, Draft

Entry = dict[str, tuple[Any, list[str], str]]
"""A data set: our key, below data -> value, keys of theirs, what differs."""
_FILES = ("json", "csv", "parquet", "text")
"""Names that `datasets` takes for a kind of file, whose path is under data_files."""


def keys_of(draft: Draft, key: str, value: Any, needed: str) -> dict[str, Any]:
    """The keys of the data set under `key`; those that are empty are dropped. Raises UserError where it is no
    section. needed: the key that each has.
    """
    if not isinstance(value, Mapping):
        raise draft.error(key, f"must be a section with `{needed}`, found {value!r:.60}")
    for name, inner in value.items():
        if inner is None:
            draft.drop(f"{key}.{name}", OFF)
    return {str(name): inner for name, inner in value.items() if inner is not None}


def take_place(
    draft: Draft, key: str, rest: dict[str, Any], name: str, default: str | None = None
) -> tuple[Any, list[str]]:
    """(file or hub id, None if nothing says it; the keys that say it), taken out of `rest`.

    name: their word for it. default: where it is not given.
    """
    keys = [f"{key}.{name}"] if name in rest else []
    place = rest.pop(name, default)
    files = rest.pop("data_files", None)
    if files is not None and place in _FILES:
        return files, [*keys, f"{key}.data_files"]
    if files is not None:
        draft.drop(f"{key}.data_files", NOT_OFFERED, "files of a hub data set; download them and name them")
    for word in ("name", "subset"):
        if (config := rest.pop(word, None)) is not None:
            place, keys = f"{place}:{config}", [*keys, f"{key}.{word}"]
    return place, keys


def take(rest: dict[str, Any], key: str, names: Mapping[str, str], found: Entry) -> None:
    """Moves those of `names` (theirs -> ours) that are in `rest` to `found`."""
    for theirs, ours in names.items():
        if theirs in rest:
            found[ours] = (rest.pop(theirs), [f"{key}.{theirs}"], "")


def set_sources(draft: Draft, entries: Sequence[Entry]) -> None:
    """data.source and its keys from the one data set, or the list of several, each with its keys."""
    if len(entries) > 1:
        _set_list(draft, "data.source", entries)
        return
    for ours, (value, keys, note) in entries[0].items():
        draft.set(f"data.{ours}", value, *keys, note=note)


def set_held_out_sources(draft: Draft, entries: Sequence[Entry]) -> None:
    """data.eval_source and its split; format and columns are one for both, those of data.source."""
    if len(entries) > 1:
        _set_list(draft, "data.eval_source", entries)
        return
    for ours, (value, keys, note) in (part for entry in entries for part in entry.items()):
        if ours in ("source", "split"):
            draft.set(f"data.eval_{ours}", value, *keys, note=note)
            continue
        is_same = value == draft.value_of(f"data.{ours}")
        for key in keys:
            if is_same:
                draft.drop(key, NOT_NEEDED, f"data.{ours} holds for held-out data, too")
            else:
                draft.drop(key, NOT_OFFERED, f"data.{ours} is one for both")


def _set_list(draft: Draft, ours: str, entries: Sequence[Entry]) -> None:
    parts = [part for entry in entries for part in entry.values()]
    plain = [{name: value for name, (value, _, _) in entry.items()} for entry in entries]
    notes = dict.fromkeys(note for *_, note in parts if note)
    draft.set(ours, plain, *(key for _, keys, _ in parts for key in keys), note="; ".join(notes))
