"""Detects the format of a source: the kind of its documents, and the meaning of its columns.

The columns of the first rows decide, in this order: a column of messages means chat, a prompt and a response
column mean pairs, a text column means text. Any `data.*_column` key overrides this. An ambiguous case is
never guessed: an error of one line lists the columns and names the key to set.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from lptune.base.errors import UserError, closest
from lptune.config import DataConfig
from lptune.data.errors import listed
from lptune.data.formats import (
    CHOSEN_NAMES,
    HISTORY_NAMES,
    INPUT_NAMES,
    LABEL_NAMES,
    MESSAGES_NAMES,
    NO_COLUMN,
    PROMPT_NAMES,
    REJECTED_NAMES,
    RESPONSE_NAMES,
    SYSTEM_NAMES,
    TEXT_NAMES,
    Format,
    placeholders,
)
from lptune.data.messages import ANSWER_ROLES, TOOLS_NAMES, is_chat, is_messages, is_missing, is_transcript
from lptune.data.sources import Row

_PLAIN_NAMES = (("chosen",), ("rejected",))
"""Names of preferences' columns that are refused beside any others; the rest, where nothing else is found."""


def detect_format(cfg: DataConfig, rows: Sequence[Row], source: str) -> Format:
    """The format of a source, by its first `rows` and the overrides of the config. Raises UserError if it is
    ambiguous.
    """
    for key, what, reader in (
        ("chosen_column", "preferences", "full_dpo"),
        ("rejected_column", "preferences", "full_dpo"),
        ("label_column", "answers with a label", "full_kto"),
    ):
        if getattr(cfg, key) is not None:
            raise UserError(
                f"data.{key}: is a column of {what}, from which {reader} learns; use that recipe, or "
                "set data.response_column to learn from one answer"
            )
    columns, first, source = _seen(rows, source)
    _check_overrides(cfg, columns, source)
    kind = cfg.format
    if kind == "auto":
        kind = _detect_kind(cfg, columns, first, source)
    if cfg.prompt_template is not None and kind != "pairs":
        raise UserError(
            f"data.prompt_template: needs pairs, but {source} is read as {kind}; drop it or set "
            "data.format=pairs"
        )
    if kind == "text":
        name = cfg.text_column or _pick(columns, TEXT_NAMES, "text", "data.text_column", source)
        return Format(kind="text", text=name)
    find = _chat_format if kind == "chat" else _pairs_format
    return _with_sides(find(cfg, columns, first, source), cfg, columns, source)


def detect_preferences(cfg: DataConfig, rows: Sequence[Row], source: str) -> Format:
    """The format of a source of preferences: a prompt, a chosen and a rejected answer, as text or as
    messages; or the two as whole conversations. Raises UserError if it is ambiguous.
    """
    columns, first, named = _seen(rows, source)
    for key in ("response_column", "text_column"):
        if getattr(cfg, key) is not None:
            raise UserError(
                f"data.{key}: full_dpo reads two answers per prompt; set data.chosen_column and "
                "data.rejected_column instead"
            )
    if cfg.format == "text":
        raise UserError("data.format: full_dpo reads pairs or chat with two answers per prompt, found text")
    _check_overrides(cfg, columns, named)
    if not (cfg.chosen_column or present(columns, CHOSEN_NAMES)):
        raise UserError(
            f"{named}: holds no preferences, and full_dpo learns from a chosen and a rejected answer; set "
            f"data.chosen_column and data.rejected_column, or use full_finetune; its columns: "
            f"{listed(columns)}"
        )
    chosen, rejected = (
        getattr(cfg, key) or _pick(columns, names, f"the {what} answer", f"data.{key}", named)
        for key, names, what in (
            ("chosen_column", CHOSEN_NAMES, "chosen"),
            ("rejected_column", REJECTED_NAMES, "rejected"),
        )
    )
    cfg = dataclasses.replace(cfg, chosen_column=None, rejected_column=None)
    if _is_conversation(first[chosen]):
        cfg = dataclasses.replace(cfg, format="chat", messages_column=chosen)
    else:
        cfg = dataclasses.replace(cfg, response_column=chosen)
    return dataclasses.replace(detect_format(cfg, rows, source), rejected=rejected)


def detect_labelled(cfg: DataConfig, rows: Sequence[Row], source: str) -> Format:
    """The format of a source of answers with a label, as pairs or chats with one more column; or of
    preferences, each of which is read as two such answers. Raises UserError if it is ambiguous.
    """
    columns, _, named = _seen(rows, source)
    labels, chosen = present(columns, LABEL_NAMES), present(columns, CHOSEN_NAMES)
    is_labelled = cfg.label_column is not None
    is_preference = cfg.chosen_column is not None or cfg.rejected_column is not None
    if not is_labelled and not is_preference:
        is_labelled, is_preference = bool(labels), bool(chosen)
    if is_labelled and is_preference:
        raise UserError(
            f"{named}: answers with a label, or preferences? Set data.label_column for the first, or "
            f"data.chosen_column for the second, and not both; its columns: {listed(columns)}"
        )
    if is_preference:
        return dataclasses.replace(detect_preferences(cfg, rows, source), is_unpaired=True)
    if not is_labelled:
        raise UserError(
            f"{named}: holds no labels, and full_kto learns from answers that are desirable or not; set "
            f"data.label_column, or use full_finetune; its columns: {listed(columns)}"
        )
    _check_overrides(cfg, columns, named)
    label = cfg.label_column or only(labels, columns, "the label", "data.label_column", named)
    fmt = detect_format(dataclasses.replace(cfg, label_column=None), rows, source)
    if fmt.kind == "text":
        raise UserError(
            f"{named}: is read as text, and full_kto needs a prompt and an answer; set data.prompt_column "
            f"and data.response_column, or data.messages_column; its columns: {listed(columns)}"
        )
    return dataclasses.replace(fmt, label=label)


def _is_conversation(value: Any) -> bool:
    """Whether `value` holds messages that begin with those of a prompt, not with an answer."""
    if not is_messages(value):
        return is_transcript(value)
    role = value[0].get("role", value[0].get("from"))
    return str(role).lower() not in ANSWER_ROLES


def _seen(rows: Sequence[Row], source: str) -> tuple[list[str], dict[str, Any], str]:
    """The columns of `rows`, the first value of each that is not missing, and the source for messages."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    first = {
        name: next((row.values[name] for row in rows if not is_missing(row.values.get(name))), None)
        for name in columns
    }
    return columns, first, _with_files(source, rows)


def _with_files(source: str, rows: Sequence[Row]) -> str:
    """`source`; for a folder or a glob also the files that the first rows come from."""
    files = list(dict.fromkeys(re.sub(r" (line|row) \d+$", "", row.place) for row in rows))
    return source if files in ([], [source]) else f"{source} ({listed(files)})"


def _with_sides(fmt: Format, cfg: DataConfig, columns: Sequence[str], source: str) -> Format:
    """`fmt` with the columns of system message and earlier turns, and with the parts not found so far."""
    free = [name for name in columns if not fmt.is_used(name)]
    has_system = cfg.system_column != NO_COLUMN
    system, history = (
        cfg.system_column if has_system else None,
        next(iter(present(free, HISTORY_NAMES)), None),
    )
    if system is None and has_system and (found := present(free, SYSTEM_NAMES)):
        system = only(found, columns, "the system message", "data.system_column", source)
    is_open = {
        "input": fmt.kind == "pairs" and cfg.input_column is None and fmt.prompt_template is None,
        "tools": fmt.kind == "chat",
        "system": has_system,
        "history": True,
    }
    fmt = dataclasses.replace(fmt, system=system, history=history)
    varied = {"tools", *(["system"] if cfg.system_column is None else [])}
    absent = tuple(
        name for name in is_open if is_open[name] and (getattr(fmt, name) is None or name in varied)
    )
    named = {*present(free, TOOLS_NAMES), *(getattr(fmt, name) for name in varied)}
    return dataclasses.replace(fmt, absent=absent, columns=frozenset(columns) - named)


def _check_overrides(cfg: DataConfig, columns: Sequence[str], source: str) -> None:
    keys = (
        "prompt_column", "input_column", "response_column", "messages_column", "text_column", "chosen_column",
        "rejected_column", "label_column", "system_column",
    )  # fmt: skip
    for key in keys:
        name = getattr(cfg, key)
        if key in ("input_column", "system_column") and name == NO_COLUMN:
            continue
        if name is not None:
            check_column(f"data.{key}", name, columns, source)


def check_column(key: str, name: str, columns: Sequence[str], source: str) -> None:
    """Raises UserError unless there is a column `name`, which the config's `key` names."""
    if name not in columns:
        near = closest(name, columns)
        raise UserError(f"{key}: {source} has no column {name!r}{near}; its columns: {listed(columns)}")


def _detect_kind(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> str:
    if cfg.messages_column:
        return "chat"
    if cfg.text_column:
        return "text"
    if cfg.prompt_column or cfg.response_column or cfg.prompt_template is not None:
        chat = cfg.prompt_column is None and any(
            is_messages(first[name]) for name in present(columns, MESSAGES_NAMES)
        )
        return "chat" if chat else "pairs"
    _refuse_preferences(columns, first, source)
    if any(is_chat(first[name]) for name in present(columns, MESSAGES_NAMES)):
        return "chat"
    prompts, responses = present(columns, (*PROMPT_NAMES, *INPUT_NAMES)), present(columns, RESPONSE_NAMES)
    if prompts and responses:
        return "pairs"
    texts = [name for name in present(columns, TEXT_NAMES) if isinstance(first[name], str)]
    if texts and not prompts and not responses:
        return "text"
    nested = [
        name
        for name in columns
        if isinstance(first[name], list) and first[name] and isinstance(first[name][0], dict)
    ]
    if prompts and nested:
        what = f"column {nested[0]!r} holds nested rows ({listed(first[nested[0]][0])})"
        raise UserError(
            f"{source}: {what}; write one row for each of them, with {prompts[0]!r} and a response column"
        )
    _refuse_preferences(columns, first, source, (CHOSEN_NAMES, REJECTED_NAMES))
    if prompts:
        missing = "a response column; set data.response_column"
    elif responses:
        missing = "a prompt column; set data.prompt_column"
    else:
        missing = (
            "prompt and response, messages or text; set data.prompt_column and data.response_column, "
            "data.messages_column or data.text_column"
        )
    raise UserError(f"{source}: cannot tell {missing}; its columns: {listed(columns)}")


def _refuse_preferences(
    columns: Sequence[str], first: dict[str, Any], source: str, names: Sequence[Sequence[str]] = _PLAIN_NAMES
) -> None:
    found = [name for each in names for name in present(columns, each)[:1]]
    if len(found) == 2:
        key = "messages" if _is_conversation(first[found[0]]) else "response"
        raise UserError(
            f"{source}: holds preferences (columns {listed(found)}), and this recipe learns from one "
            f"response per prompt; use full_dpo or full_kto, or set data.{key}_column={found[0]} or "
            f"another of {listed(columns)}"
        )


def _chat_format(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> Format:
    if cfg.response_column is None and cfg.messages_column is None:
        _refuse_preferences(columns, first, source)
    name = cfg.messages_column
    if name is None:
        found = present(columns, MESSAGES_NAMES)
        found = [column for column in found if is_chat(first[column])] or found
        name = only(found, columns, "messages", "data.messages_column", source)
    tools = next(iter(present(columns, TOOLS_NAMES)), None)
    is_text = is_transcript(first[name])
    return Format(
        kind="chat", messages=name, is_transcript=is_text, tools=tools, response=cfg.response_column
    )


def _pairs_format(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> Format:
    has_input = cfg.input_column != NO_COLUMN
    taken = {cfg.prompt_column, cfg.input_column, cfg.response_column}
    free = [name for name in columns if name not in taken]
    response = cfg.response_column
    if response is None:
        _refuse_preferences(columns, first, source)
        response = _pick(free, RESPONSE_NAMES, "the response", "data.response_column", source)
    template = cfg.prompt_template
    filled = placeholders(template) if template is not None else []
    for name in filled:
        check_column("data.prompt_template", name, columns, source)
    if template is not None and response in filled:
        raise UserError(
            f"data.prompt_template: the prompt must not hold {{{response}}}, the response column itself"
        )
    second = cfg.input_column if has_input else None
    prompt = cfg.prompt_column or (filled[0] if filled else None)
    if prompt is None:
        names = [name for name in present(free, PROMPT_NAMES) if name != response]
        # Some datasets call the prompt itself `input`.
        names = names or [name for name in present(free, INPUT_NAMES) if name not in (response, second)]
        prompt = only(names, columns, "the prompt", "data.prompt_column", source)
    if second is None and template is None and has_input:
        rest = [name for name in present(free, INPUT_NAMES) if name not in (prompt, response)]
        second = rest[0] if len(rest) == 1 else None
        if len(rest) > 1:
            raise UserError(
                f"{source}: columns {listed(rest)} could each be the prompt's second part; set "
                "data.input_column to one of them or to none"
            )
    if is_messages(first.get(prompt)):
        return Format(
            kind="chat",
            messages=prompt,
            response=response,
            tools=next(iter(present(columns, TOOLS_NAMES)), None),
        )
    return Format(kind="pairs", prompt=prompt, input=second, response=response, prompt_template=template)


def present(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns with one of `names` (upper or lower case), in the order of `names`."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    return [by_lower[name] for name in names if name in by_lower]


def _pick(columns: Sequence[str], names: Sequence[str], what: str, key: str, source: str) -> str:
    return only(present(columns, names), columns, what, key, source)


def only(found: Sequence[str], columns: Sequence[str], what: str, key: str, source: str) -> str:
    """The only one of the columns `found`. Raises UserError if there is none, or several."""
    if not found:
        raise UserError(f"{source}: no column for {what} among {listed(columns)}; set {key}")
    if len(found) > 1:
        raise UserError(f"{source}: columns {listed(found)} could each be {what}; set {key} to one of them")
    return found[0]
