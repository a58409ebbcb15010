"""axolotl's data sets -> data.source, its formats and columns."""

from collections.abc import Mapping
from typing import Any

from lptune.tools.migrate.common import PROMPTS
from lptune.tools.migrate.draft import BY_DESIGN, NOT_NEEDED, NOT_OFFERED, OFF, UNKNOWN, Draft

_PAIRS = {"instruction": "prompt_column", "input": "input_column", "output": "response_column"}
_ALPACA_NOTE = f"without the sentences of Alpaca around instruction and input; {PROMPTS}"
_FORMATS: dict[str, tuple[str, str]] = {
    "alpaca": ("pairs", _ALPACA_NOTE),
    "alpaca_chat": ("pairs", PROMPTS),
    "alpaca_w_system": ("pairs", _ALPACA_NOTE),
    "jeopardy": ("pairs", PROMPTS),
    "gpteacher": ("pairs", PROMPTS),
    "chat_template": ("chat", ""),
    "sharegpt": ("chat", ""),
    "completion": ("text", ""),
    "pretrain": ("text", ""),
}
"""First part of `type` -> format, what differs."""

_CHAT_KEYS = (
    "message_field_role",
    "message_field_content",
    "message_property_mappings",
    "roles",
    "conversation",
    "field_human",
    "field_model",
)
_NOT_NEEDED = {
    "ds_type": "the kind of a file is read from its name",
    "shards": "rows are read one by one",
    "trust_remote_code": "code of a data set is never run",
    "type": "",
}


def fill(draft: Draft) -> None:
    """data.* from datasets or pretraining_dataset, test_datasets, val_set_size and train_on_inputs."""
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "datasets"
    if key != "datasets" and draft.get("datasets") is not None:
        draft.drop("datasets", NOT_OFFERED, "pretraining_dataset is what is trained on")
    entries = _entries(draft, key)
    if not entries:
        draft.set("data.source", "FILL-IN.jsonl")
        draft.ask("data.source", "a file, a folder, a glob or a hub data set")
    elif len(entries) == 1:
        for ours, (value, theirs, note) in entries[0].items():
            draft.set(f"data.{ours}", value, *theirs, note=note)
    else:
        plain = [{ours: each[0] for ours, each in entry.items()} for entry in entries]
        notes = {each[2] for entry in entries for each in entry.values() if each[2]}
        names = [name for entry in entries for each in entry.values() for name in each[1]]
        draft.set("data.source", plain, *names, note="; ".join(sorted(notes)))
    if draft.get("train_on_inputs") is not None:
        draft.set("data.train_on_prompt", draft.get("train_on_inputs") is True, "train_on_inputs")
    _held_out(draft)


def _held_out(draft: Draft) -> None:
    share = draft.number("val_set_size", 0.0)
    if share >= 1:
        draft.drop("val_set_size", BY_DESIGN, "a share is held out, not a number of rows")
        draft.ask("data.eval_fraction", f"{share:g} / the number of rows")
    elif share > 0:
        draft.set(
            "data.eval_fraction",
            share,
            "val_set_size",
            note="of the documents, before they are packed; other rows",
        )
    elif draft.get("val_set_size") is not None:
        draft.drop("val_set_size", OFF)
    tests = _entries(draft, "test_datasets")
    if len(tests) == 1:
        found = tests[0]
        draft.set("data.eval_source", found["source"][0], *found["source"][1], note=found["source"][2])
        if "split" in found:
            draft.set("data.eval_split", found["split"][0], *found["split"][1])
        others = [name for ours, each in found.items() if ours not in ("source", "split") for name in each[1]]
        for name in others:
            draft.drop(name, NOT_NEEDED, "columns and format of data hold for held-out data, too")
    elif tests:
        plain = [{ours: each[0] for ours, each in entry.items()} for entry in tests]
        draft.set(
            "data.eval_source",
            plain,
            *(name for entry in tests for each in entry.values() for name in each[1]),
        )


Entry = dict[str, tuple[Any, tuple[str, ...], str]]
"""Our key, below data -> value, keys of theirs, what differs."""


def _entries(draft: Draft, key: str) -> list[Entry]:
    listed = draft.get(key, [])
    if isinstance(listed, (str, Mapping)):
        listed = [listed]
    if not isinstance(listed, list):
        raise draft.error(key, f"must be a list of data sets, found {listed!r:.60}")
    return [
        _entry(draft, f"{key}[{i}]" if isinstance(draft.get(key), list) else key, each)
        for i, each in enumerate(listed)
    ]


def _entry(draft: Draft, key: str, value: Any) -> Entry:
    if isinstance(value, str):
        return {"source": (value, (key,), "")}
    if not isinstance(value, Mapping):
        raise draft.error(key, f"must be a section with `path`, found {value!r:.60}")
    rest = {str(name): each for name, each in value.items()}
    for name in [name for name, each in rest.items() if each is None]:
        draft.drop(f"{key}.{name}", OFF)
        del rest[name]
    found: Entry = {}
    note = _kind(draft, key, rest, found)
    path, keys = rest.pop("path", None), [f"{key}.path"]
    files = rest.pop("data_files", None)
    if path in ("json", "csv", "parquet", "text") and files is not None:
        path = files
        keys.append(f"{key}.data_files")
    elif files is not None:
        draft.drop(f"{key}.data_files", NOT_OFFERED, "files of a hub data set; download them and name them")
    if (config := rest.pop("name", None)) is not None:
        path = f"{path}:{config}"
        keys.append(f"{key}.name")
    if path is None:
        raise draft.error(key, "names no `path`")
    found = {"source": (path, tuple(keys), note), **found}
    if (split := rest.pop("split", None)) is not None:
        found["split"] = (split, (f"{key}.split",), "")
    _others(draft, key, rest, found)
    return found


def _kind(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> str:
    """Format and columns from `type`; returns what differs."""
    kind = rest.pop("type", None)
    name = str(kind).partition(".")[0].partition(":")[0] if isinstance(kind, str) else None
    if name in _FORMATS:
        form, note = _FORMATS[name]
        found["format"] = (form, (f"{key}.type",), "")
        return note
    if isinstance(kind, Mapping):
        found["format"] = ("pairs", (f"{key}.type",), "")
        for word, ours in {**_PAIRS, "system": "system_column"}.items():
            if column := kind.get(f"field_{word}"):
                found[ours] = (column, (f"{key}.type.field_{word}",), "")
        if kind.get("format"):
            draft.ask(
                "data.prompt_template", f"{key}.type.format: {kind['format']!r:.60}, with names of columns"
            )
        return PROMPTS
    if kind is not None:
        draft.drop(f"{key}.type", NOT_OFFERED, f"{kind}")
        draft.ask("data.format", f"{key}.type: {kind} is not known; pairs, chat or text, and the columns")
    return ""


def _others(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> None:
    columns = {"field_messages": "messages_column", "field": "text_column", "text_column": "text_column",
               "field_system": "system_column", "field_instruction": "prompt_column",
               "field_input": "input_column", "field_output": "response_column"}  # fmt: skip
    for name, value in rest.items():
        if name in columns:
            found[columns[name]] = (value, (f"{key}.{name}",), "")
        elif name in _CHAT_KEYS:
            draft.drop(f"{key}.{name}", NOT_NEEDED, "role and content, and from and value, are recognised")
        elif name in _NOT_NEEDED:
            draft.drop(f"{key}.{name}", NOT_NEEDED, _NOT_NEEDED[name])
        elif name == "chat_template":
            draft.drop(f"{key}.{name}", BY_DESIGN, "one template for all sources: data.chat_template")
        elif name in ("roles_to_train", "train_on_eos", "train_on_eot", "message_field_training"):
            draft.drop(
                f"{key}.{name}",
                BY_DESIGN,
                "the template's generation marks and weight: 0 of a message decide",
            )
        else:
            draft.drop(f"{key}.{name}", UNKNOWN)
