"""Prompts: rows and typed lines as the token ids that a model answers, written as in training.

    messages            the chat template, up to where the assistant begins
    prompt (and input)  with a chat template, the message of a user; without, PROMPT⏎INPUT⏎
    text                raw text, which the model continues

In the plain layout each prompt ends where the response began in training (layout.py). Every prompt begins
with the tokens that the tokenizer puts before a text.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lptune.base.errors import UserError
from lptune.config import PromptsConfig, check_sources, entries
from lptune.data.detect import check_column, only, present
from lptune.data.errors import BadRows, RowError
from lptune.data.formats import (
    INPUT_NAMES,
    MESSAGES_NAMES,
    PROMPT_NAMES,
    TEXT_NAMES,
    fill,
    optional_text,
    placeholders,
    required_text,
)
from lptune.data.layout import check_characters
from lptune.data.messages import TOOLS_NAMES, is_messages, read_chat, read_tools
from lptune.data.sources import Row, read_rows
from lptune.data.tokenizer import Tokenizer
from lptune.data.turns import UnwrittenFinder

_DETECTION_ROWS = 32
_DATA_KEY = re.compile(r"\bdata\.(?=(source|split|chat_template|\w+_column)\b)")


class Prompt(NamedTuple):
    """A prompt, and the row that it was made of."""

    row: Row
    ids: list[int]
    is_text: bool
    """Whether it is raw text, which the answer continues."""


def read_prompts(cfg: PromptsConfig, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Prompt]:
    """The prompts of `cfg.source`, in order. The columns are checked now; most rows are read when their
    prompts are needed.

    vocab_size: of the model. Raises UserError as `PromptWriter` does, and, with the place of the row, for a
    row that cannot be used.
    """
    assert cfg.source is not None
    with _keys_of_prompts():
        check_sources("prompts.source", entries(cfg.source))
        rows = read_rows(cfg.source, BadRows("error"), split=cfg.split, max_rows=cfg.max_rows)
        first = list(itertools.islice(rows, _DETECTION_ROWS))
    return _written(PromptWriter(cfg, tokenizer, vocab_size, first), itertools.chain(first, rows))


def _written(writer: "PromptWriter", rows: Iterable[Row]) -> Iterator[Prompt]:
    with _keys_of_prompts():
        for row in rows:
            try:
                yield writer.of_row(row)
            except RowError as problem:
                raise UserError(f"{row.place}: {problem}") from None


@contextmanager
def _keys_of_prompts() -> Iterator[None]:
    """Renames keys in errors. The code that reads rows for training also reads prompts, and its errors name
    keys of `data`; `prompts` has the same keys, but no on_bad_row.
    """
    try:
        yield
    except UserError as error:
        line = str(error).replace(" (or set data.on_bad_row=skip)", "").replace(" rows to train on", " rows")
        raise UserError(_DATA_KEY.sub("prompts.", line)) from None


class PromptWriter:
    """Writes prompts as token ids.

    rows: the first rows of the source, which decide the columns; none for prompts that are typed. Raises
    UserError for columns that are missing or ambiguous.
    """

    def __init__(
        self, cfg: PromptsConfig, tokenizer: Tokenizer, vocab_size: int, rows: Sequence[Row] = ()
    ) -> None:
        self.cfg, self.tokenizer, self.vocab_size = cfg, tokenizer, vocab_size
        if cfg.system_prompt is not None and tokenizer.template is None:
            raise UserError(
                f"prompts.system_prompt: is written by a chat template, and {tokenizer.folder} has none; set "
                "prompts.chat_template"
            )
        if cfg.prompt_template is not None:
            placeholders(cfg.prompt_template, "prompts.prompt_template")
        if cfg.prompt_template is not None and tokenizer.template is not None:
            raise UserError(
                "prompts.prompt_template: the chat template lays out prompts; set prompts.chat_template=none "
                "to use a prompt template"
            )
        self.kind, self.column, self.input = _columns(cfg, rows) if rows else ("typed", "prompt", None)
        if self.kind == "messages" and tokenizer.template is None:
            raise UserError(
                f"{tokenizer.folder}: has no chat template, and column {self.column!r} holds chats; set "
                "prompts.chat_template to the one of its training"
            )

    def of_row(self, row: Row) -> Prompt:
        """The prompt of a row. Raises RowError if the row cannot be used."""
        values = row.values
        if self.kind == "messages":
            messages = read_chat(values.get(self.column), self.column)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()  # the answer that the row has
            if not messages:
                raise RowError(f"column {self.column!r} holds no message before the assistant's")
            tools = [read_tools(values.get(name), name) for name in TOOLS_NAMES]
            if all(tools):
                raise RowError(f"columns {', '.join(TOOLS_NAMES)} could each be the tools; keep one of them")
            return Prompt(row, self.of_messages(messages, next(filter(None, tools), None)), False)
        if self.kind == "text":
            return Prompt(row, self.of_text(required_text(values, self.column)), True)
        second = optional_text(values, self.input) if self.input else ""
        prompt = optional_text(values, self.column) if second else required_text(values, self.column)
        if self.tokenizer.template is not None:
            content = "\n".join(part for part in (prompt, second) if part)
            return Prompt(row, self.of_messages([{"role": "user", "content": content}]), False)
        if self.cfg.prompt_template is not None:
            return Prompt(row, self.of_text(self.filled(values)), False)
        return Prompt(row, self.of_text("".join(f"{part}\n" for part in (prompt, second) if part)), False)

    def filled(self, values: Mapping[str, Any]) -> str:
        """`prompts.prompt_template` with the columns of a row."""
        template = self.cfg.prompt_template
        assert template is not None
        return fill(template, {name: optional_text(values, name) for name in placeholders(template)})

    def of_messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids of a conversation, up to the assistant's next turn. Raises RowError if the chat template
        refuses it.
        """
        template = self.tokenizer.template
        assert template is not None
        if self.cfg.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.cfg.system_prompt}, *messages]
        messages = UnwrittenFinder(template).with_calls(messages, tools)
        text = template.render(messages, tools, add_generation_prompt=True).text
        return self._ids(text)

    def of_text(self, text: str) -> list[int]:
        """The ids of a text that the model continues, with the tokenizer's prefix."""
        return self._ids(text, self.tokenizer.prefix_ids)

    def _ids(self, text: str, prefix_ids: Sequence[int] = ()) -> list[int]:
        check_characters(text)
        ids = [*prefix_ids, *self.tokenizer.encode(text, add_special=False)]
        if not ids:
            raise RowError("the prompt has no token; give it text")
        if max(ids) >= self.vocab_size:
            raise UserError(
                f"{self.tokenizer.folder}: token {max(ids)} of a prompt is beyond the model's vocabulary of "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )
        return ids


def _columns(cfg: PromptsConfig, rows: Sequence[Row]) -> tuple[str, str, str | None]:
    """(messages | prompt | text, its column, the column of the prompt's second part or None)."""
    source, columns = str(cfg.source), list(dict.fromkeys(name for row in rows for name in row.values))
    for key in ("messages_column", "prompt_column", "input_column", "text_column"):
        if (name := getattr(cfg, key)) is not None:
            check_column(f"prompts.{key}", name, columns, source)
    if cfg.messages_column:
        return "messages", cfg.messages_column, None
    if cfg.text_column:
        return "text", cfg.text_column, None
    if cfg.prompt_template is not None:
        names = placeholders(cfg.prompt_template)
        for name in names:
            check_column("prompts.prompt_template", name, columns, source)
        if names:
            return "prompt", cfg.prompt_column or names[0], None
    if cfg.prompt_column is None:
        chats = [
            name
            for name in present(columns, MESSAGES_NAMES)
            if any(is_messages(row.values.get(name)) for row in rows)
        ]
        if chats:
            return "messages", only(chats, columns, "the messages", "prompts.messages_column", source), None
    prompts = [cfg.prompt_column] if cfg.prompt_column else present(columns, PROMPT_NAMES)
    texts = present(columns, TEXT_NAMES)
    if not prompts and texts:
        return "text", only(texts, columns, "the text", "prompts.text_column", source), None
    prompts = prompts or present(columns, INPUT_NAMES)
    column = only(prompts, columns, "the prompt", "prompts.prompt_column", source)
    seconds = [cfg.input_column] if cfg.input_column else present(columns, INPUT_NAMES)
    seconds = [name for name in seconds if name != column]
    if not seconds:
        return "prompt", column, None
    return "prompt", column, only(seconds, columns, "the input", "prompts.input_column", source)
