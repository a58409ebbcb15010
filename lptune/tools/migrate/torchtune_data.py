"""torchtune's dataset builders -> data.source, its format and columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lptune.tools.migrate.common import PROMPTS
from lptune.tools.migrate.draft import NOT_NEEDED, NOT_OFFERED, OFF, UNKNOWN, Draft

_FILES = {"json": ".jsonl", "csv": ".csv", "text": ".txt", "parquet": ".parquet"}
"""Names that `datasets` takes for a kind of file, whose path is under data_files."""


@dataclass(frozen=True)
class Builder:
    """What a builder reads if its arguments do not say otherwise."""

    format: str
    source: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """The builder's word for a column -> our key."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The builder's word for a column -> the column, if column_map does not say it."""
    trains_on_prompt: bool = False
    text: str = PROMPTS


_PAIRS = {"input": "prompt_column", "output": "response_column"}
_ALPACA = Builder(
    "pairs",
    "tatsu-lab/alpaca",
    {"instruction": "prompt_column", "input": "input_column", "output": "response_column"},
    {"instruction": "instruction", "input": "input", "output": "output"},
    trains_on_prompt=True,
    text=f"without the sentences of Alpaca around instruction and input; {PROMPTS}",
)
BUILDERS = {
    "alpaca_dataset": _ALPACA,
    "alpaca_cleaned_dataset": Builder(
        "pairs", "yahma/alpaca-cleaned", _ALPACA.columns, _ALPACA.names, True, _ALPACA.text
    ),
    "instruct_dataset": Builder("pairs", None, _PAIRS, {"input": "input", "output": "output"}),
    "grammar_dataset": Builder("pairs", "liweili/c4_200m", _PAIRS, {"input": "input", "output": "output"}),
    "samsum_dataset": Builder("pairs", "Samsung/samsum", _PAIRS, {"input": "dialogue", "output": "summary"}),
    "chat_dataset": Builder("chat"),
    "slimorca_dataset": Builder("chat", "Open-Orca/SlimOrca-Dedup", names={"messages": "conversations"}),
    "text_completion_dataset": Builder("text", text=""),
    "wikitext_dataset": Builder("text", "EleutherAI/wikitext_document_level", text=""),
    "cnn_dailymail_articles_dataset": Builder(
        "text", "ccdv/cnn_dailymail", names={"text": "article"}, text=""
    ),
}
_COLUMN_KEYS = {"column": "text_column", "conversation_column": "messages_column"}
_NOT_NEEDED = {
    "conversation_style": "both styles of chats are recognised",
    "split_across_pack": "documents are not cut to fill a row; long texts are cut into chunks",
    "add_eos": "a text ends with the end token",
}


def fill(draft: Draft) -> None:
    """data.source and its keys from `dataset`, data.eval_source from `dataset_val`."""
    dataset = draft.get("dataset")
    listed = dataset if isinstance(dataset, list) else [] if dataset is None else [dataset]
    found = [_entry(draft, f"dataset[{i}]" if dataset is listed else "dataset", each)
             for i, each in enumerate(listed)]  # fmt: skip
    entries = [each for each in found if each is not None]
    if not entries or len(entries) < len(found):
        draft.set("data.source", "FILL-IN.jsonl")
        draft.ask("data.source", "a file, a folder, a glob or a hub data set")
    elif dataset is listed:
        _set_sources(draft, entries)
    else:
        for ours, (value, keys, note) in entries[0].items():
            draft.set(f"data.{ours}", value, *keys, note=note)
    if draft.value_of("data.packing") is None:
        draft.set("data.packing", False)
    _evaluation(draft)


_OF_ALL = ("train_on_prompt", "packing")
"""Keys of ours that hold for all sources; each data set of torchtune has its own."""


def _set_sources(draft: Draft, entries: "list[Entry]") -> None:
    """data.source of several data sets, and the keys that they must agree about."""
    plain = [{ours: each[0] for ours, each in entry.items() if ours not in _OF_ALL} for entry in entries]
    notes = dict.fromkeys(each[2] for entry in entries for each in entry.values() if each[2])
    names = [f"dataset[{i}]" for i in range(len(entries))]
    draft.set("data.source", plain, *names, note="; ".join(notes))
    for ours in _OF_ALL:
        keys = [key for entry in entries if ours in entry for key in entry[ours][1]]
        # A text has no prompt, so it has no opinion.
        asked = [entry for entry in entries if ours != "train_on_prompt" or entry["format"][0] != "text"]
        values = {entry[ours][0] if ours in entry else False for entry in asked}
        if len(values) > 1:
            text = "is one for all sources, and these data sets differ"
            draft.set(f"data.{ours}", False, *keys, note=f"data.{ours} {text}")
            draft.ask(f"data.{ours}", f"true or false: it {text}")
        elif keys:
            draft.set(f"data.{ours}", values.pop(), *keys)


def _evaluation(draft: Draft) -> None:
    value = draft.get("dataset_val")
    if value is None:
        return
    found = _entry(draft, "dataset_val", value)
    if found is None:
        draft.ask("data.eval_source", "held-out data")
        return
    for ours, (value, keys, note) in found.items():
        if ours in ("source", "split"):
            draft.set(f"data.eval_{ours}", value, *keys, note=note if ours == "source" else "")
        elif value == draft.value_of(f"data.{ours}"):
            for key in keys:
                draft.drop(key, NOT_NEEDED, f"data.{ours} holds for held-out data, too")
        else:
            for key in keys:
                draft.drop(key, NOT_OFFERED, f"data.{ours} is one for both")


Entry = dict[str, tuple[Any, tuple[str, ...], str]]
"""Our key, below data -> value, keys of theirs, what differs."""


def _entry(draft: Draft, key: str, value: Any) -> Entry | None:
    """The `Entry` of one dataset; None if its builder is not known."""
    if not isinstance(value, Mapping):
        raise draft.error(key, f"must be a section with `_component_`, found {value!r:.60}")
    name = str(value.get("_component_", "")).rpartition(".")[2]
    builder = BUILDERS.get(name)
    if builder is None:
        draft.drop(key, NOT_OFFERED, f"{name or 'a dataset without _component_'} is not known")
        return None
    component = f"{key}._component_"
    rest = {name: each for name, each in value.items() if name != "_component_" and each is not None}
    for name in [name for name, each in value.items() if each is None]:
        draft.drop(f"{key}.{name}", OFF)
    found: Entry = {
        "source": _source(draft, key, builder, rest),
        "format": (builder.format, (component,), ""),
    }
    if (split := rest.pop("split", None)) is not None:
        found["split"] = (split, (f"{key}.split",), "")
    _columns(draft, key, builder, rest, found)
    prompt = rest.pop("train_on_input", None)
    if builder.format != "text" and bool(prompt if prompt is not None else builder.trains_on_prompt):
        origin = f"{key}.train_on_input" if prompt is not None else component
        found["train_on_prompt"] = (True, (origin,), "")
    elif prompt is not None:
        draft.drop(f"{key}.train_on_input", OFF)
    _others(draft, key, rest, found)
    return found


def _source(
    draft: Draft, key: str, builder: Builder, rest: dict[str, Any]
) -> tuple[Any, tuple[str, ...], str]:
    source = rest.pop("source", None)
    keys: tuple[str, ...] = (f"{key}.source",) if source is not None else (f"{key}._component_",)
    source = source or builder.source
    files = rest.pop("data_files", None)
    if source in _FILES and files is not None:
        return files, (*keys, f"{key}.data_files"), builder.text
    if files is not None:
        draft.drop(f"{key}.data_files", NOT_OFFERED, "files of a hub data set; download them and name them")
    if source is None:
        draft.ask("data.source", f"{key} names no source")
        source = "FILL-IN.jsonl"
    for name in ("name", "subset"):
        if (config := rest.pop(name, None)) is not None:
            source, keys = f"{source}:{config}", (*keys, f"{key}.{name}")
    return source, keys, builder.text


def _columns(draft: Draft, key: str, builder: Builder, rest: dict[str, Any], found: Entry) -> None:
    names = dict(builder.names)
    mapped = rest.pop("column_map", None) or {}
    for word, column in mapped.items():
        ours = builder.columns.get(word)
        if ours is None:
            draft.drop(f"{key}.column_map.{word}", UNKNOWN)
        else:
            found[ours] = (column, (f"{key}.column_map.{word}",), "")
    for word, ours in builder.columns.items():
        if word in names and names[word] != word and ours not in found:
            found[ours] = (names[word], (f"{key}._component_",), "")
    for word, ours in {"messages": "messages_column", "text": "text_column"}.items():
        if word in names:
            found[ours] = (names[word], (f"{key}._component_",), "")
    for word, ours in _COLUMN_KEYS.items():
        if (column := rest.pop(word, None)) is not None:
            found[ours] = (column, (f"{key}.{word}",), "")


def _others(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> None:
    if "packed" in rest:
        note = (
            "a document in each row, padded to data.seq_len here and to the longest of a batch there; with "
            "data.packing=true a step holds more documents and little padding"
        )
        on = rest.pop("packed") is True
        found["packing"] = (on, (f"{key}.packed",), "" if on else note)
    if (prompt := rest.pop("new_system_prompt", None)) is not None:
        found["system_prompt"] = (prompt, (f"{key}.new_system_prompt",), "")
    for name, value in rest.items():
        if value is None:
            draft.drop(f"{key}.{name}", OFF)
        elif name in _NOT_NEEDED:
            draft.drop(f"{key}.{name}", NOT_NEEDED, _NOT_NEEDED[name])
        else:
            draft.drop(f"{key}.{name}", UNKNOWN)
