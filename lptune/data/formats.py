"""From a row's columns to one of three kinds of documents.

chat   `messages` or `conversations`: a `Conversation`
pairs  a prompt and a response column under any of the usual names: a `Pair`
text   one column of raw text: a `Text`

A system message and earlier turns in columns of their own belong to the document. A row that is marked as not
to be learned, or that has images, is refused. detect.py finds the kind and the meaning of each column by the
first rows of a source.
"""

import dataclasses
import json
import string
from collections.abc import Collection, Mapping
from typing import Any

from lptune.base.errors import UserError, closest
from lptune.data.errors import RowError, listed
from lptune.data.messages import (
    HIDDEN_KEYS,
    TOOLS_NAMES,
    is_messages,
    is_missing,
    read_chat,
    read_messages,
    read_tools,
)
from lptune.data.sources import JsonFloat, Row

SYSTEM_NAMES = ("system", "system_prompt", "system_message")
HISTORY_NAMES = ("history",)
MEDIA_NAMES = ("images", "image", "videos", "video", "audios", "audio")
ROW_LOSS_KEYS = ("loss_weight", "loss_mask", "train", "trainable", "masked")
"""Those of LOSS_KEYS with only one meaning as a column: `weight` may be the weight of a patient."""


def refuse_unlearnable(values: Mapping[str, Any], used: Collection[str]) -> None:
    """Raises RowError for a pair that is marked as not to be learned, or that is not text alone.

    values: the row. used: the columns that are part of the document; their values are content.
    """
    for name, value in values.items():
        if name in used or is_missing(value):
            continue
        lower = name.lower()
        if lower in ("label", "kto_tag") and (value is False or str(value).lower() == "false"):
            raise RowError(
                f"column {name!r} is false, which marks a bad answer (KTO), and every answer is learned; "
                "remove the row"
            )
        if lower in MEDIA_NAMES and value not in ("", [], {}):
            raise RowError(f"column {name!r} holds {lower}, and only text can be trained on; remove the row")
        hides = ("true", "1", "1.0") if lower in HIDDEN_KEYS else ("false", "0", "0.0")
        if lower in ROW_LOSS_KEYS and str(value).lower() in hides:
            raise RowError(f"column {name!r} says that the row is not learned ({value}); remove the row")


def earlier_turns(value: Any, column: str) -> list[dict[str, str]]:
    """The messages of `history`, a list of [prompt, response]. These turns are learned like the last one."""
    if is_missing(value) or value in ("", []):
        return []
    turns: list[dict[str, str]] = []
    for pair in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise RowError(f"column {column!r} must hold a list of [prompt, response]; write it as messages")
        prompt, response = pair
        if not response.strip():
            raise RowError(f"column {column!r} holds an empty response; give it text or remove the turn")
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return turns


PROMPT_NAMES = ("instruction", "prompt", "question", "query", "problem", "user_input", "source")
INPUT_NAMES = ("input", "context")
_WHOLE_OR_ANSWER = ("response", "messages", "conversation", "conversations", "answer", "completion")
CHOSEN_NAMES = ("chosen", *(f"chosen_{what}" for what in _WHOLE_OR_ANSWER), "preferred")
REJECTED_NAMES = ("rejected", *(f"rejected_{what}" for what in _WHOLE_OR_ANSWER), "dispreferred")
LABEL_NAMES = ("label", "kto_tag")
RESPONSE_NAMES = ("output", "response", "answer", "completion", "solution", "target", "reply")
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat")
TEXT_NAMES = ("text", "content", "raw_text")
NO_COLUMN = "none"
"""Value of `data.input_column` or `data.system_column`: no column is used, whatever the names are."""
_PART_NAMES = {
    "input": "the prompt's second part",
    "tools": "the tools",
    "system": "the system message",
    "history": "the earlier turns",
}
_USUAL_NAMES = {"input": INPUT_NAMES, "tools": TOOLS_NAMES, "system": SYSTEM_NAMES, "history": HISTORY_NAMES}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat in the common form that chat templates read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt (with its optional second part) and a response."""

    prompt: str
    input: str
    response: str
    filled_template: str | None
    """`data.prompt_template`, filled with the columns of the row."""
    system: str = ""
    """The system message of the row."""
    history: tuple[dict[str, str], ...] = ()
    """The messages of earlier turns."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A document of raw text."""

    text: str


Document = Conversation | Pair | Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of one source are read: kind and columns."""

    kind: str
    """chat | pairs | text."""
    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    rejected: str | None = None
    """Of preferences: the column of the rejected answer. The chosen one is in `response`, or, as a whole
    conversation, in `messages`."""
    is_unpaired: bool = False
    """Of preferences: whether each is read as two answers with a label, the chosen one as desirable."""
    label: str | None = None
    """Of answers with a label: the column of the label."""
    messages: str | None = None
    is_transcript: bool = False
    """Whether `messages` held a transcript in the first rows (messages.py)."""
    tools: str | None = None
    text: str | None = None
    system: str | None = None
    history: str | None = None
    prompt_template: str | None = None
    absent: tuple[str, ...] = ()
    """The parts among input, tools, system and history that the first rows lack, and those that each row may
    have in another column. A row has such a part under one of its usual names."""
    columns: frozenset[str] = frozenset()
    """The columns of the first rows, but for those of tools and system messages."""

    def _parts(self) -> dict[str, str]:
        """Part -> the column that is used for it."""
        names = (
            "prompt", "input", "response", "rejected", "label", "messages", "tools", "text", "system",
            "history",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def describe(self) -> str:
        """Text for the report: `pairs (prompt: question, response: answer)`."""
        kind = f"{self.kind} in transcripts" if self.is_transcript else self.kind
        return f"{kind} ({', '.join(f'{name}: {column}' for name, column in self._parts().items())})"

    def is_used(self, column: str) -> bool:
        """Whether a column of this name is read."""
        filled = placeholders(self.prompt_template) if self.prompt_template is not None else ()
        return column in self._parts().values() or column in filled or self._part_of(column) is not None

    @property
    def todo_of_unused(self) -> str:
        """How a column that is not used becomes half of the prompt; empty where the config chose a half."""
        return "; data.input_column=NAME puts one into the prompt" if "input" in self.absent else ""

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The columns that hold chat messages."""
        columns = (self.messages, self.response, self.rejected) if self.messages else ()
        return tuple(name for name in columns if name)

    def _part_of(self, column: str) -> str | None:
        """The part of `absent` that `column` is by its name; None if it is none."""
        if column in self.columns:
            return None
        return next((name for name in self.absent if column.lower() in _USUAL_NAMES[name]), None)

    def in_row(self, values: dict[str, Any]) -> "Format":
        """This format with the columns of `absent` that the row has. RowError if two could be one part."""
        if not self.absent or values.keys() <= self.columns:
            return self
        late: dict[str, Any] = {}
        for column in values:
            value = values[column]
            part = None if is_missing(value) or value in ("", []) else self._part_of(column)
            if part in late:
                raise RowError(
                    f"columns {late[part]}, {column} could each be {_PART_NAMES[part]}; keep one of them"
                )
            if part:
                late[part] = column
        return dataclasses.replace(self, absent=(), **late) if late else self

    def document(self, row: Row) -> Document:
        """The document of `row`. Raises RowError for a missing or unusable value."""
        values = row.values
        if self.kind == "text":
            assert self.text
            return Text(required_text(values, self.text))
        return self.in_row(values)._answered(values)

    def preference(self, row: Row) -> tuple[Document, Document]:
        """The documents of `row` with the chosen and with the rejected answer. Raises RowError as `document`,
        and if the answers belong to different prompts.
        """
        assert self.rejected
        if self.response:
            other = dataclasses.replace(self, response=self.rejected, rejected=self.response)
        else:
            other = dataclasses.replace(self, messages=self.rejected)
        chosen, rejected = self.document(row), other.document(row)
        if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
            return with_common_prompt(chosen, rejected)
        return chosen, rejected

    def labelled(self, row: Row) -> list[tuple[Document, bool]]:
        """The documents of `row`, each with its label: whether its answer is desirable. A preference gives
        two. Raises RowError as `document` and `preference`, and for a value that is no label.

        Of a conversation, the label is that of the answers after its last user message.
        """
        if self.is_unpaired:
            chosen, rejected = self.preference(row)
            return [(chosen, True), (rejected, False)]
        assert self.label
        is_desirable = required_label(row.values, self.label)
        document = self.document(row)
        return [(last_answer(document) if isinstance(document, Conversation) else document, is_desirable)]

    def _answered(self, values: dict[str, Any]) -> Conversation | Pair:
        refuse_unlearnable(values, self._parts().values())
        system = optional_text(values, self.system) if self.system else ""
        system = system if system.strip() else ""
        history = earlier_turns(values.get(self.history), self.history) if self.history else []
        if self.kind == "chat":
            conversation = self._conversation(values)
            return dataclasses.replace(
                conversation, messages=self._with_system(system, history, conversation.messages)
            )
        assert self.prompt
        assert self.response
        if is_messages(values.get(self.prompt)):
            raise RowError(
                f"column {self.prompt!r} holds chat messages; set data.messages_column={self.prompt}"
            )
        response = required_text(values, self.response)
        second = optional_text(values, self.input) if self.input else ""
        if self.prompt_template is not None:
            names = placeholders(self.prompt_template)
            filled = fill(self.prompt_template, {name: optional_text(values, name) for name in names})
            return Pair(filled, "", response, filled, system, tuple(history))
        prompt = optional_text(values, self.prompt) if second else required_text(values, self.prompt)
        return Pair(prompt, second, response, None, system, tuple(history))

    def _with_system(
        self, system: str, history: list[dict[str, str]], messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """`messages` with the system message and the turns of other columns."""
        if history:
            raise RowError(
                f"column {self.history!r} holds turns beside those in {self.messages!r}; put all into one"
            )
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": system}, *messages] if system else messages
        if system and messages[0]["content"] != system:
            raise RowError(
                f"column {self.system!r} and message 1 of {self.messages!r} are two system messages; keep one"
            )
        return messages

    def _conversation(self, values: dict[str, Any]) -> Conversation:
        assert self.messages
        if self.messages not in values:
            raise RowError(_lacks(values, self.messages))
        messages = read_chat(values[self.messages], self.messages)
        if self.response:
            answer = _read_answer(values, self.response)
            if answer[0]["role"] == "assistant":
                messages = self._without_answer(values, messages)
            # Some rows repeat the prompt before the answer.
            messages = answer if answer[: len(messages)] == messages else messages + answer
        elif self.rejected and not any(message["role"] in ("system", "user") for message in messages):
            raise RowError(f"column {self.messages!r} holds an answer without its prompt; put both into it")
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError(
                f"column {self.messages!r} holds no assistant message, so there is nothing to learn"
            )
        return Conversation(messages, read_tools(values.get(self.tools), self.tools) if self.tools else None)

    def _without_answer(self, values: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages`, the prompt, without the answer of another column at its end. RowError if it ends with
        another answer.
        """
        for column in filter(None, (self.response, self.rejected)):
            answer = _read_answer(values, column)
            if messages[-len(answer) :] == answer and len(answer) < len(messages):
                return messages[: -len(answer)]
        if messages[-1]["role"] == "assistant":
            raise RowError(
                f"column {self.messages!r} ends with an answer that is not the one of {self.response!r}; the "
                "beginning of an answer belongs into that column"
            )
        return messages


def _read_answer(values: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The answer in `column`, text or messages, as messages."""
    answer = values.get(column)
    return read_messages(
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer, column
    )


def with_common_prompt(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, Conversation]:
    """The two conversations, in which nothing is learned (weight 0) of the answers that both begin with.

    Raises RowError unless the first message that differs is the assistant's in both. Equal conversations
    differ in nothing; their last answers are taken for it.
    """
    both = chosen.messages, rejected.messages
    num_equal = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    num_common = num_equal - (both[0] == both[1])
    if any([message["role"] for message in each[num_common:][:1]] != ["assistant"] for each in both):
        raise RowError(
            f"the chosen and the rejected conversation differ in message {num_common + 1}, which is not an "
            "answer in both; give both the same prompt, and an answer each"
        )
    return _answered_from(chosen, num_common), _answered_from(rejected, num_common)


def last_answer(conversation: Conversation) -> Conversation:
    """The conversation, in which only what follows its last user message is learned.

    Raises RowError if no answer follows that message.
    """
    roles = [message["role"] for message in conversation.messages]
    first = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    if "assistant" not in roles[first:]:
        raise RowError("ends with a message of the user, and the label is that of an answer; add the answer")
    return _answered_from(conversation, first)


def _answered_from(conversation: Conversation, first: int) -> Conversation:
    """The conversation, in which nothing is learned (weight 0) of the answers before message `first`."""
    context = [
        {**message, "weight": 0} if message["role"] == "assistant" else message
        for message in conversation.messages[:first]
    ]
    return dataclasses.replace(conversation, messages=context + conversation.messages[first:])


def placeholders(template: str, key: str = "data.prompt_template") -> list[str]:
    """The columns that a prompt template names, each once. UserError for anything but {column}. key: of the
    config, for the message.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{key}: {error}; write a brace that is not a placeholder as {{{{ or }}}}") from None
    names = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion:
            raise UserError(
                f"{key}: placeholders are {{column}}, found "
                f"{{{name}{'!' + conversion if conversion else ''}}}"
            )
        names.append(name)
    return list(dict.fromkeys(names))


def fill(template: str, values: dict[str, str]) -> str:
    """`template` with its placeholders replaced. Braces inside a value are not replaced again."""
    return "".join(
        literal + (values[name] if name else "") for literal, name, _, _ in string.Formatter().parse(template)
    )


def required_text(values: Mapping[str, Any], name: str) -> str:
    """The text of column `name`. Raises RowError if it is missing, empty or no text."""
    if name not in values:
        raise RowError(_lacks(values, name))
    text = optional_text(values, name)
    if not text.strip():
        raise RowError(
            f"column {name!r} is {'null' if is_missing(values[name]) else 'empty'}; give it text or remove "
            "the row"
        )
    return text


def optional_text(values: Mapping[str, Any], name: str) -> str:
    """The text of column `name`, a number as JSON writes it; empty if it is missing. Raises RowError for a
    list.
    """
    value = values.get(name)
    if is_missing(value):
        return ""
    if isinstance(value, JsonFloat):
        return value.text
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if not isinstance(value, str):
        raise RowError(
            f"column {name!r} must be text, found a {type(value).__name__}; flatten it or choose another "
            "column"
        )
    return value


def required_label(values: Mapping[str, Any], name: str) -> bool:
    """The label in column `name`: true or false, 1 or 0, also as text. Raises RowError for other values."""
    if name not in values:
        raise RowError(_lacks(values, name))
    value = values[name]
    text = value.strip().lower() if isinstance(value, str) else value
    for is_desirable, spellings in ((True, ("true", "1")), (False, ("false", "0"))):
        if text in spellings or (isinstance(value, (bool, int, float)) and value == is_desirable):
            return is_desirable
    found = "null" if is_missing(value) else f"{value!r:.40}"
    raise RowError(
        f"column {name!r} must be true (a desirable answer) or false, found {found}; correct it or remove "
        "the row"
    )


def _lacks(values: Mapping[str, Any], name: str) -> str:
    return f"has no column {name!r}{closest(name, values)}; its columns: {listed(values)}"
