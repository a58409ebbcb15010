"""Chat templates: jinja programs that come with a checkpoint and write a conversation as the model's own
text.

They are rendered as transformers renders them (same environment, filters, globals and variables), so the text
and every token equal those of `apply_chat_template`. They are also code of other people, so they run in a
sandbox: no access to Python, and limits on the work and the output of a rendering (sandbox.py).

`{% generation %} … {% endgeneration %}` marks the text that the assistant writes. The block puts two marks
into the output; the marks are then removed and their positions noted. This works inside macros and loops,
too.

Most templates read a call's arguments as an object, some as JSON text. Which of the two is tried once, on the
first conversation with a call, with arguments of our own: a template that takes text fails on the object, or
writes it as Python does.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date as Date
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext

from lptune.base.errors import UserError
from lptune.data.errors import RowError
from lptune.data.messages import REASONING_KEYS, arguments_text
from lptune.data.sandbox import Sandbox, TooMuchWorkError

MAX_OUTPUT_CHARACTERS = 64 * 1024 * 1024
"""Largest rendering. A longer one is an endless template, not a conversation."""

MAX_SOURCE_CHARS = 256 * 1024
"""Largest template, ten times the longest in use: compiling one takes time and stack."""

_Objects = Sequence[Mapping[str, Any]]
_PROBE = {"qzx": "zxq"}
_PROBE_TEXT = json.dumps(_PROBE)

_OPEN, _CLOSE = (f"\x02{secrets.token_hex(8)}{letter}\x03" for letter in "OC")


class Rendered(NamedTuple):
    """A rendered conversation: its text and marks."""

    text: str
    marks: list[tuple[int, int]]
    """Character spans of `{% generation %}` blocks; empty when the template has none."""


class ChatTemplate:
    """The chat template of a tokenizer, compiled once.

    sources: jinja text by name: `default`, and `tool_use` for conversations that carry tools, where there is
    one. special_tokens: `bos_token` … as the template's variables. special_texts: every special token's text.
    where: names the template's origin in messages. date: what `strftime_now` sees; today when None.
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
        self._environment = environment = _environment(self.date)
        self._compiled = {}
        self._text_arguments: dict[str, bool] = {}
        for name, source in self.sources.items():
            if len(source) > MAX_SOURCE_CHARS:
                raise UserError(
                    f"{where}: has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read"
                )
            try:
                self._compiled[name] = environment.from_string(environment.counted(source))
            except jinja2.TemplateSyntaxError as error:
                raise UserError(
                    f"{where}: line {error.lineno}: not a jinja template: {error.message}"
                ) from None
            except Exception as error:  # nesting too deep for jinja, or for the Python that it writes
                raise UserError(f"{where}: not a jinja template: {type(error).__name__}: {error}") from None

    def source(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The jinja text that is used for a conversation with or without `tools`."""
        return self.sources[self._name(tools)]

    def has_marks(self, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether the template marks by `{% generation %}` what the assistant writes."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source(tools)) is not None

    @property
    def work_left(self) -> int:
        """Rest of `sandbox.MAX_WORK` after the last rendering."""
        return self._environment.work.left

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """`messages` as text. If the template refuses them, raises RowError with the template's message."""
        if any(message.get("tool_calls") for message in messages) and self._takes_text(messages, tools):
            messages = [_with_arguments(message, arguments_text) for message in messages]
        return self._render(messages, tools, add_generation_prompt)

    def _takes_text(self, messages: _Objects, tools: _Objects | None) -> bool:
        """Whether the template reads the arguments of calls as JSON text. `messages` have a call."""
        name = self._name(tools)
        if name not in self._text_arguments:
            as_object, as_text = (self._try(messages, tools, probe) for probe in (_PROBE, _PROBE_TEXT))
            if "zxq" in as_object and str(_PROBE) not in as_object:
                self._text_arguments[name] = False
            elif _PROBE_TEXT in as_text:
                self._text_arguments[name] = True
        return self._text_arguments.get(name, False)

    def _try(self, messages: _Objects, tools: _Objects | None, arguments: Any) -> str:
        """The text of `messages` with `arguments` in each call; empty if the template refuses them."""
        try:
            tried = [_with_arguments(message, lambda _: arguments) for message in messages]
            return self._render(tried, tools, False).text
        except RowError:
            return ""

    def _render(self, messages: _Objects, tools: _Objects | None, add_generation_prompt: bool) -> Rendered:
        compiled = self._compiled[self._name(tools)]
        variables = {
            **self.special_tokens,
            "messages": [_template_message(message) for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        self._environment.start()
        try:
            for piece in compiled.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARACTERS:
                    raise RowError(
                        f"the chat template writes more than {MAX_OUTPUT_CHARACTERS:,} characters for it; "
                        f"fix {self.where}"
                    )
        except RowError:
            raise
        except TooMuchWorkError as error:  # not an error of the row: the next one would take as long
            raise UserError(f"{self.where}: takes {error} for {len(messages)} messages; fix it") from None
        except jinja2.TemplateError as error:
            raise RowError(
                f"the chat template refuses it: {error.message or error}; change the row or {self.where}"
            ) from None
        except Exception as error:  # a template is a program and can fail in any way
            raise RowError(
                f"the chat template fails on it: {type(error).__name__}: {error}; change the row or "
                f"{self.where}"
            ) from None
        return _take_marks("".join(pieces))

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "tool_use" if tools and "tool_use" in self.sources else "default"


class _Generation(jinja2.ext.Extension):
    """Adds the block `{% generation %}` to jinja."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment(today: Date) -> Sandbox:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML; models were not trained on that.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(pattern: str) -> str:
        if len(pattern) > 1000:  # "%c" a million times would be as large a text
            raise jinja2.TemplateError("strftime_now has a pattern of more than 1,000 characters")
        return datetime.combine(today, datetime.now().time()).strftime(pattern)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.meter()
    return environment


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for the template: without empty keys, and with reasoning under each name that is in use."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _with_arguments(message: Mapping[str, Any], make: Callable[[Any], Any]) -> Mapping[str, Any]:
    """`message`, in which the arguments of each call are what `make` makes of them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": make(call["function"]["arguments"])}}
        if "arguments" in call.get("function", {})
        else call
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def _take_marks(text: str) -> Rendered:
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
