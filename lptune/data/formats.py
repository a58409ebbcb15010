"""From a row's columns to one of three kinds of documents.

chat   `messages` or `conversations`: a `Conversation`
pairs  a prompt and a response column under any of the usual names: a `Pair`
text   one column of raw text: a `Text`

The kind is read off the columns of the first rows, in this order, and any `data.*_column` key overrides it.
What is ambiguous is never guessed: one line lists the columns and names the key to set.
"""

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

from lptune.config import DataConfig, UserError, closest
from lptune.data.errors import RowError
from lptune.data.messages import is_messages, read_messages, read_tools
from lptune.data.sources import Row

PROMPT_NAMES = ("instruction", "prompt", "question", "query", "problem", "user_input", "source")
INPUT_NAMES = ("input", "context")
RESPONSE_NAMES = ("output", "response", "answer", "completion", "solution", "target", "reply")
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat")
TEXT_NAMES = ("text", "content", "raw_text")
TOOLS_NAMES = ("tools", "functions")
NO_INPUT = "none"
"""As `data.input_column`: the prompt has no second part, whatever the columns are called."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat, in the form that chat templates read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt (with its optional second part) and a response."""

    prompt: str
    input: str
    response: str
    filled_template: str | None
    """`data.prompt_template` filled in from the row's columns."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Raw text."""

    text: str


Document = Conversation | Pair | Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of one source are read."""

    kind: str
    """chat | pairs | text."""
    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    messages: str | None = None
    tools: str | None = None
    text: str | None = None
    prompt_template: str | None = None

    def describe(self) -> str:
        """`pairs (prompt: question, response: answer)`."""
        names = ("prompt", "input", "response", "messages", "tools", "text")
        used = [f"{name}: {getattr(self, name)}" for name in names if getattr(self, name)]
        return f"{self.kind} ({', '.join(used)})"

    def document(self, row: Row) -> Document:
        """The row's document. Raises RowError for a missing or unusable value."""
        values = row.values
        if self.kind == "text":
            assert self.text
            return Text(_required_text(values, self.text))
        if self.kind == "chat":
            assert self.messages
            return self._conversation(values)
        assert self.prompt
        assert self.response
        if is_messages(values.get(self.prompt)):
            raise RowError(
                f"column {self.prompt!r} holds chat messages; set data.messages_column={self.prompt}"
            )
        response = _required_text(values, self.response)
        second = _optional_text(values, self.input) if self.input else ""
        if self.prompt_template is not None:
            names = _placeholders(self.prompt_template)
            filled = _fill(self.prompt_template, {name: _optional_text(values, name) for name in names})
            return Pair(filled, "", response, filled)
        prompt = _optional_text(values, self.prompt) if second else _required_text(values, self.prompt)
        return Pair(prompt, second, response, None)

    def _conversation(self, values: dict[str, Any]) -> Conversation:
        assert self.messages
        if self.messages not in values:
            raise RowError(_lacks(values, self.messages))
        messages = read_messages(values[self.messages], self.messages)
        if self.response:
            answer = values.get(self.response)
            if isinstance(answer, str):
                answer = [{"role": "assistant", "content": answer}]
            messages = messages + read_messages(answer, self.response)
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError(
                f"column {self.messages!r} holds no assistant message, so there is nothing to learn"
            )
        return Conversation(messages, read_tools(values.get(self.tools), self.tools) if self.tools else None)


def detect_format(cfg: DataConfig, rows: Sequence[Row], source: str) -> Format:
    """The format of a source from its first `rows` and the config's overrides. UserError when it cannot be
    told.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    first = {
        name: next((row.values[name] for row in rows if row.values.get(name) is not None), None)
        for name in columns
    }
    _check_overrides(cfg, columns, source)
    kind = cfg.format
    if kind == "auto":
        kind = _detect_kind(cfg, columns, first, source)
    if cfg.prompt_template is not None and kind != "pairs":
        raise UserError(
            f"data.prompt_template: needs pairs, but {source} is read as {kind}; drop it or set "
            "data.format=pairs"
        )
    if kind == "chat":
        return _chat_format(cfg, columns, first, source)
    if kind == "text":
        name = cfg.text_column or _pick(columns, TEXT_NAMES, "text", "data.text_column", source)
        return Format(kind="text", text=name)
    return _pairs_format(cfg, columns, first, source)


def _check_overrides(cfg: DataConfig, columns: Sequence[str], source: str) -> None:
    keys = ("prompt_column", "input_column", "response_column", "messages_column", "text_column")
    for key in keys:
        name = getattr(cfg, key)
        if key == "input_column" and name == NO_INPUT:
            continue
        if name is not None and name not in columns:
            raise UserError(
                f"data.{key}: {source} has no column {name!r}{closest(name, columns)}; its columns: "
                f"{_listed(columns)}"
            )


def _detect_kind(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> str:
    if cfg.messages_column:
        return "chat"
    if cfg.text_column:
        return "text"
    if cfg.prompt_column or cfg.response_column or cfg.prompt_template is not None:
        chat = cfg.prompt_column is None and any(
            is_messages(first[name]) for name in _present(columns, MESSAGES_NAMES)
        )
        return "chat" if chat else "pairs"
    _refuse_preferences(columns, source)
    if any(is_messages(first[name]) for name in _present(columns, MESSAGES_NAMES)):
        return "chat"
    prompts, responses = _present(columns, (*PROMPT_NAMES, *INPUT_NAMES)), _present(columns, RESPONSE_NAMES)
    if prompts and responses:
        return "pairs"
    texts = [name for name in _present(columns, TEXT_NAMES) if isinstance(first[name], str)]
    if texts and not prompts and not responses:
        return "text"
    nested = [
        name
        for name in columns
        if isinstance(first[name], list) and first[name] and isinstance(first[name][0], dict)
    ]
    if prompts and nested:
        inner = _listed(first[nested[0]][0])
        raise UserError(
            f"{source}: column {nested[0]!r} holds nested rows ({inner}); write one row for each of them, "
            f"with {prompts[0]!r} and a "
            f"response column"
        )
    if prompts:
        missing = "a response column; set data.response_column"
    elif responses:
        missing = "a prompt column; set data.prompt_column"
    else:
        missing = (
            "prompt and response, messages or text; set data.prompt_column and data.response_column, "
            "data.messages_column or data.text_column"
        )
    raise UserError(f"{source}: cannot tell {missing}; its columns: {_listed(columns)}")


def _refuse_preferences(columns: Sequence[str], source: str) -> None:
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(
            f"{source}: holds preferences (columns chosen, rejected), and full_finetune learns from one "
            "response per prompt; "
            f"set data.response_column=chosen or another of {_listed(columns)}"
        )


def _chat_format(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> Format:
    if cfg.response_column is None and cfg.messages_column is None:
        _refuse_preferences(columns, source)
    name = cfg.messages_column
    if name is None:
        found = _present(columns, MESSAGES_NAMES)
        found = [column for column in found if is_messages(first[column])] or found
        name = _only(found, columns, "messages", "data.messages_column", source)
    tools = next(iter(_present(columns, TOOLS_NAMES)), None)
    return Format(kind="chat", messages=name, tools=tools, response=cfg.response_column)


def _pairs_format(cfg: DataConfig, columns: Sequence[str], first: dict[str, Any], source: str) -> Format:
    has_input = cfg.input_column != NO_INPUT
    taken = {cfg.prompt_column, cfg.input_column, cfg.response_column}
    free = [name for name in columns if name not in taken]
    response = cfg.response_column
    if response is None:
        _refuse_preferences(columns, source)
        response = _pick(free, RESPONSE_NAMES, "the response", "data.response_column", source)
    template = cfg.prompt_template
    placeholders = _placeholders(template) if template is not None else []
    for name in placeholders:
        if name not in columns:
            raise UserError(
                f"data.prompt_template: {source} has no column {name!r}{closest(name, columns)}; its "
                f"columns: {_listed(columns)}"
            )
    if template is not None and response in placeholders:
        raise UserError(
            f"data.prompt_template: the prompt must not hold {{{response}}}, the response column itself"
        )
    second = cfg.input_column if has_input else None
    prompt = cfg.prompt_column or (placeholders[0] if placeholders else None)
    if prompt is None:
        names = [name for name in _present(free, PROMPT_NAMES) if name != response]
        # Some sets call the prompt itself `input`.
        names = names or [name for name in _present(free, INPUT_NAMES) if name not in (response, second)]
        prompt = _only(names, columns, "the prompt", "data.prompt_column", source)
    if second is None and template is None and has_input:
        rest = [name for name in _present(free, INPUT_NAMES) if name not in (prompt, response)]
        second = rest[0] if len(rest) == 1 else None
        if len(rest) > 1:
            raise UserError(
                f"{source}: columns {_listed(rest)} could each be the prompt's second part; set "
                "data.input_column to one of them or to none"
            )
    if is_messages(first.get(prompt)):
        return Format(
            kind="chat",
            messages=prompt,
            response=response,
            tools=next(iter(_present(columns, TOOLS_NAMES)), None),
        )
    return Format(kind="pairs", prompt=prompt, input=second, response=response, prompt_template=template)


def _present(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns that bear one of `names` (case aside), in the order of `names`."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    return [by_lower[name] for name in names if name in by_lower]


def _pick(columns: Sequence[str], names: Sequence[str], what: str, key: str, source: str) -> str:
    return _only(_present(columns, names), columns, what, key, source)


def _only(found: Sequence[str], columns: Sequence[str], what: str, key: str, source: str) -> str:
    if not found:
        raise UserError(f"{source}: no column for {what} among {_listed(columns)}; set {key}")
    if len(found) > 1:
        raise UserError(f"{source}: columns {_listed(found)} could each be {what}; set {key} to one of them")
    return found[0]


def _placeholders(template: str) -> list[str]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"data.prompt_template: {error}; write a brace that is no placeholder as {{{{ or }}}}"
        ) from None
    names = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion:
            raise UserError(
                f"data.prompt_template: placeholders are {{column}}, found "
                f"{{{name}{'!' + conversion if conversion else ''}}}"
            )
        names.append(name)
    return list(dict.fromkeys(names))


def _fill(template: str, values: dict[str, str]) -> str:
    """`template` with its placeholders replaced, once: braces inside a value stay as they are."""
    return "".join(
        literal + (values[name] if name else "") for literal, name, _, _ in string.Formatter().parse(template)
    )


def _required_text(values: dict[str, Any], name: str) -> str:
    if name not in values:
        raise RowError(_lacks(values, name))
    text = _optional_text(values, name)
    if not text.strip():
        raise RowError(
            f"column {name!r} is {'null' if values[name] is None else 'empty'}; give it text or remove the "
            "row"
        )
    return text


def _optional_text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    if not isinstance(value, str):
        raise RowError(
            f"column {name!r} must be text, found a {type(value).__name__}; flatten it or choose another "
            "column"
        )
    return value


def _lacks(values: dict[str, Any], name: str) -> str:
    return f"has no column {name!r}{closest(name, values)}; its columns: {_listed(values)}"


def _listed(names: Any) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") or "none"
