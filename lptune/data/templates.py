"""Chat templates: jinja programs that come with a checkpoint and write a conversation as the model's own
text.

They are rendered in the environment of transformers, so the text and every token equal those of
`apply_chat_template`. Three things are ours. `strftime_now` gives the day of the run's start: with today, a
run that is resumed tomorrow would have other rows. The positions of `{% generation %} … {% endgeneration %}`,
which marks what the assistant writes, are exact: the block writes two marks into the output, and they are
then removed and noted. And a template is code of other people: jinja's sandbox keeps it away from Python, and
limits on time, memory and output are those of the process that renders it (hf.py).

Most templates read a call's arguments as an object, some as JSON text. Which of the two is tried once, on the
first conversation with a call, with arguments of our own: a template that takes text fails on the object, or
writes it as Python does.
"""

import contextlib
import copy
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date as Date
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from lptune.base.errors import UserError
from lptune.base.files import MEBI
from lptune.data import hf
from lptune.data.errors import RowError
from lptune.data.messages import REASONING_KEYS, arguments_text

MAX_OUTPUT_CHARACTERS = 64 * MEBI
"""Largest rendering. A longer one is an endless template, not a conversation."""

MAX_SOURCE_CHARS = 256 * 1024
"""Largest template, ten times the longest in use: compiling one takes time and stack."""

MAX_CPU_S = 20.0
"""Time of a processor that one question to the template may take; a long conversation takes milliseconds."""

MAX_MEMORY = 1024 * MEBI
"""What it may add to the memory of its process."""

_PROBE = {"qzx": "zxq"}
_PROBE_TEXT = json.dumps(_PROBE)
_OPEN, _CLOSE = (f"\x02{secrets.token_hex(8)}{letter}\x03" for letter in "OC")

Message = Mapping[str, Any]
Messages = Sequence[Message]
Part = tuple[int, bool]
"""A beginning of a conversation: number of messages, and whether the generation prompt follows them."""
Asked = tuple[Messages, Messages | None, Sequence[Part]]
"""Messages, tools, and the parts to render."""


class Rendered(NamedTuple):
    """A rendered conversation: its text and marks."""

    text: str
    marks: list[tuple[int, int]]
    """Character spans of `{% generation %}` blocks; empty when the template has none."""


class ChatTemplate:
    """The chat template of a tokenizer, compiled once.

    sources: jinja text by name: `default`, and `tool_use` for conversations that carry tools, where there is
    one. special_tokens: `bos_token` … as the template's variables. special_texts: every special token's text.
    where: names the template's origin in messages. date: what `strftime_now` sees; today when None. Raises
    UserError for one that is no jinja template.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        special_texts: Iterable[str] = (),
        *,
        where: str = "chat template",
        date: Date | None = None,
    ) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self.special_texts = frozenset(special_texts) | frozenset(special_tokens.values())
        self.where = where
        self.date = date or datetime.now().date()
        self._text_arguments: dict[str, bool] = {}
        self._has_marks = {
            name: re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
            for name, source in self.sources.items()
        }
        for source in self.sources.values():
            if len(source) > MAX_SOURCE_CHARS:
                raise UserError(
                    f"{where}: has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read"
                )
            self._ask(source, [])

    def anew(self) -> "ChatTemplate":
        """The same template, which has not seen a conversation yet."""
        found = copy.copy(self)
        found._text_arguments = {}
        return found

    def source(self, tools: Messages | None = None) -> str:
        """The jinja text that is used for a conversation with or without `tools`."""
        return self.sources[self._name(tools)]

    def has_marks(self, tools: Messages | None = None) -> bool:
        """Whether the template marks by `{% generation %}` what the assistant writes."""
        return self._has_marks[self._name(tools)]

    def render(
        self, messages: Messages, tools: Messages | None = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """`messages` as text. If the template refuses them, raises RowError with the template's message."""
        return self.render_parts(messages, tools, [(len(messages), add_generation_prompt)])[0]

    def attempt(self, messages: Messages, tools: Messages | None, *, prompt: bool = False) -> str | None:
        """The text of `render`; None if the template refuses the messages."""
        try:
            return self.render(messages, tools, add_generation_prompt=prompt).text
        except RowError:
            return None

    def render_parts(
        self, messages: Messages, tools: Messages | None, parts: Sequence[Part]
    ) -> list[Rendered]:
        """Some beginnings of a conversation as text, in one question, which saves time.

        Rendering stops at a part that the template refuses, or when the texts become too long for one answer:
        the result has at least one item, and may have fewer than `parts`. Raises RowError if the template
        refuses the first part.
        """
        if any(message.get("tool_calls") for message in messages) and self._takes_text(messages, tools):
            messages = [_with_arguments(message, arguments_text) for message in messages]
        return self._render(messages, tools, parts)

    def render_ahead(self, conversations: Sequence[Asked]) -> list[list[Rendered]]:
        """`render_parts` of many conversations without tool calls, in as few questions as possible, which
        saves most of the time of small ones. A list is empty where that failed, for whatever reason:
        `render_parts` then tells it of that conversation alone.
        """
        found: list[list[Rendered]] = [[] for _ in conversations]
        for name in {self._name(tools) for _, tools, _ in conversations}:
            numbers = [i for i, (_, tools, _) in enumerate(conversations) if self._name(tools) == name]
            with contextlib.suppress(UserError, RowError):
                answer = self._ask(self.sources[name], [conversations[i] for i in numbers])
                texts = iter(answer.bodies)
                for i, count in zip(numbers, answer.facts.get("counts", ()), strict=False):
                    found[i] = [_rendered(body) for body in itertools.islice(texts, count)]
        return found

    def _takes_text(self, messages: Messages, tools: Messages | None) -> bool:
        """Whether the template reads the arguments of calls as JSON text. `messages` have a call."""
        name = self._name(tools)
        if name not in self._text_arguments:
            as_object, as_text = (self._try(messages, tools, probe) for probe in (_PROBE, _PROBE_TEXT))
            if "zxq" in as_object and str(_PROBE) not in as_object:
                self._text_arguments[name] = False
            elif _PROBE_TEXT in as_text:
                self._text_arguments[name] = True
        return self._text_arguments.get(name, False)

    def _try(self, messages: Messages, tools: Messages | None, arguments: Any) -> str:
        """The text of `messages` with `arguments` in each call; empty if the template refuses them."""
        try:
            tried = [_with_arguments(message, lambda _: arguments) for message in messages]
            return self._render(tried, tools, [(len(tried), False)])[0].text
        except RowError:
            return ""

    def _render(self, messages: Messages, tools: Messages | None, parts: Sequence[Part]) -> list[Rendered]:
        answer = self._ask(self.source(tools), [(messages, tools, parts)])
        if answer.bodies:
            return [_rendered(body) for body in answer.bodies]
        message = answer.facts["message"]
        match answer.facts["error"]:
            case "long":
                raise RowError(
                    f"the chat template writes more than {MAX_OUTPUT_CHARACTERS:,} characters for it; "
                    f"fix {self.where}"
                )
            case "refused":
                raise RowError(f"the chat template refuses it: {message}; change the row or {self.where}")
            case _:
                raise RowError(f"the chat template fails on it: {message}; change the row or {self.where}")

    def _ask(self, source: str, conversations: Sequence[Asked]) -> hf.Answer:
        # Without a conversation only the syntax is checked, which the source decides.
        ask = (
            hf.ask if conversations else partial(hf.ask_once, content=[source.encode(errors="surrogatepass")])
        )
        try:
            answer = ask(
                "render",
                cpu_s=MAX_CPU_S,
                memory=MAX_MEMORY,
                max_characters=MAX_OUTPUT_CHARACTERS,
                source=source,
                marks=(_OPEN, _CLOSE),
                today=self.date.isoformat(),
                variables={**self.special_tokens, "documents": None},
                conversations=[
                    ([_template_message(message) for message in messages], tools or None, parts)
                    for messages, tools, parts in conversations
                ],
            )
        except hf.EndedError as error:  # not an error of the row: the next one would take as long
            num_messages = sum(len(messages) for messages, _, _ in conversations)
            raise UserError(f"{self.where}: {error} for {num_messages} messages; fix it") from None
        except UserError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(f"holds what is no JSON, {error}; change the row") from None
        match answer.facts.get("error"):
            case "syntax":
                line, reason = answer.facts["line"], answer.facts["message"]
                raise UserError(f"{self.where}: line {line}: not a jinja template: {reason}")
            case "compile":
                raise UserError(f"{self.where}: not a jinja template: {answer.facts['message']}")
        return answer

    def _name(self, tools: Messages | None) -> str:
        return "tool_use" if tools and "tool_use" in self.sources else "default"


def _template_message(message: Message) -> dict[str, Any]:
    """A message for the template: without empty keys, and with reasoning under each name that is in use."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _with_arguments(message: Message, make: Callable[[Any], Any]) -> Message:
    """`message`, in which the arguments of each call are what `make` makes of them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": make(call["function"]["arguments"])}}
        if "arguments" in call.get("function", {})
        else call
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def _rendered(body: bytes) -> Rendered:
    text = body.decode("utf-8", "surrogatepass")
    if _OPEN not in text:
        return Rendered(text, [])
    pieces: list[str] = []
    marks: list[tuple[int, int]] = []
    length, start = 0, 0
    for piece in re.split(f"({_OPEN}|{_CLOSE})", text):
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            marks.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return Rendered("".join(pieces), marks)
