"""Writes a document as text before it is tokenized, and marks which characters are learned.

The chat template, if there is one, writes conversations and pairs. Without a template, a pair has the plain
layout

    <bos>PROMPT⏎INPUT⏎RESPONSE<eos>

(the line of INPUT only where the row has one, <bos> where the tokenizer itself puts it),
or `data.prompt_template` filled in, followed by the response and <eos>. Raw text is <bos>TEXT<eos>.

In the plain layout, prompt and response are tokenized separately: in training the model continues exactly the
tokens that it gets at inference, also if the prompt ends in a space. A chat is tokenized as one text, as
`apply_chat_template` does.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data.errors import RowError
from lptune.data.formats import Conversation, Document, Format, Pair, Text
from lptune.data.named_templates import suggested
from lptune.data.report import Tally
from lptune.data.templates import Rendered
from lptune.data.tokenizer import Tokenizer
from lptune.data.turns import SYSTEM, TurnFinder, UnwrittenFinder

MAX_UNKNOWN = 0.01
"""Largest share of characters, or of tokens, that a tokenizer may not know. What is dropped is never learned,
and a model of such a text answers without these characters, too."""


class Written(NamedTuple):
    """A document as text: a rendered chat with the assistant's spans, or a prompt and a response, or raw
    text.
    """

    text: str
    spans: list[tuple[int, int]] | None = None
    """Character spans of a chat that the assistant writes."""
    follow_prompt: list[bool] | None = None
    """For each span, whether the text before it is the prompt that a model gets to write it."""
    response: str | None = None
    """The response of a pair in the plain layout; `text` is then the prompt."""
    rejected: "Written | None" = None
    """Of a preference: the document with the rejected answer. This one has the chosen answer."""
    label: bool | None = None
    """Of an answer with a label: whether it is desirable."""


class Layout:
    """Writes the documents of one chunk of a source (workers.py), and counts what the report should mention.
    What it learns of the template by trying is its own, so that a chunk does not depend on those before it.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, fmt: Format) -> None:
        self.tokenizer = tokenizer
        self.source = cfg.source
        self.system_prompt = cfg.system_prompt
        self.train_on_prompt = cfg.train_on_prompt
        template = tokenizer.template.anew() if tokenizer.template else None
        self.finder = TurnFinder(template) if template else None
        self.unwritten_finder = UnwrittenFinder(template) if template else None
        self.is_text = fmt.kind == "text"
        self.tally = Tally()
        self.counts = self.tally.counts
        self._ahead: dict[int, list[Rendered]] = {}
        if fmt.kind == "chat" and self.finder is None:
            raise UserError(
                f"{tokenizer.folder}: has no chat template, and the data are chats; "
                f"{suggested(tokenizer.special_texts)}"
            )
        if cfg.system_prompt is not None and (self.finder is None or self.is_text):
            why = (
                f"{cfg.source} is raw text, which has none"
                if self.is_text
                else f"{tokenizer.folder} has none; set data.chat_template"
            )
            raise UserError(f"data.system_prompt: is written by a chat template, and {why}")
        if cfg.prompt_template is not None and self.finder is not None:
            raise UserError(
                "data.prompt_template: the chat template lays out the pairs already; set "
                "data.chat_template=none to use a prompt template"
            )
        if not self.is_text and self.finder is None and tokenizer.eos_id is None:
            raise UserError(
                f"{tokenizer.folder}: names no eos token, so the model would never learn to stop; add "
                '"eos_token" to tokenizer_config.json'
            )

    def describe(self) -> str:
        """A phrase for the report, on how documents are written."""
        if self.is_text:
            return "raw text"
        return "chat template" if self.finder else "plain layout"

    @property
    def template_text(self) -> str:
        """The source of the chat template with all its variants; empty without a template."""
        return "\n".join(self.finder.template.sources.values()) if self.finder else ""

    def write(self, document: Document) -> Written:
        """`document` as text. Raises RowError if the template refuses it."""
        if isinstance(document, Text):
            written = Written(document.text)
        elif self.finder is not None:
            written = self._write_chat(document)
        else:
            assert isinstance(document, Pair)
            written = _plain(document)
        for text in (written.text, written.response or "") if written.spans is None else ():
            check_characters(text)
            if self.tokenizer.alphabet:
                self._count_unknown(text, self.tokenizer.alphabet.unknown(text))
        return written

    def _count_unknown(self, text: str, places: list[int]) -> None:
        self.counts["num_characters"] += len(text)
        self.counts["num_unknown_characters"] += len(places)
        if len(self.tally.characters) < 8:
            self.tally.characters.update(text[i] for i in places[:100])

    def render_ahead(self, documents: Iterable[Document]) -> None:
        """Renders the conversations among `documents` in one question, before each is written. Those with
        tool calls are left to `write`: what the template makes of a call decides what is asked.
        """
        if self.finder is None:
            return
        asked = {}
        for document in documents:
            if not isinstance(document, Text):
                messages, tools = _conversation(document)
                if not any(message.get("tool_calls") for message in messages):
                    messages, _ = self._prompted(messages)
                    asked[id(document)] = (messages, tools, self.finder.parts(messages, tools))
        self._ahead = dict(zip(asked, self.finder.template.render_ahead([*asked.values()]), strict=True))

    def _prompted(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """`messages` with `data.system_prompt`, and whether it was put before them."""
        if self.system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return messages, False
        return [{"role": "system", "content": self.system_prompt}, *messages], True

    def _write_chat(self, document: Conversation | Pair) -> Written:
        assert self.finder is not None
        assert self.unwritten_finder is not None
        given, tools = _conversation(document)
        messages = given
        if self.train_on_prompt and any(message.get("weight") == 0 for message in messages):
            raise RowError(
                "has an answer that is not learned (weight 0), and data.train_on_prompt=true learns every "
                "token; give up one of the two"
            )
        messages = [*self.unwritten_finder.with_calls(messages, tools)]
        self.counts["num_inlined_calls"] += messages != given
        messages, is_prompted = self._prompted(messages)
        turns = self.finder.find(messages, tools, self._ahead.pop(id(document), ()))
        self.counts["num_rewritten_turns"] += turns.num_rewritten
        is_closed = turns.is_closed or (self.train_on_prompt and self.finder.closing_token() is not None)
        self.counts["num_chats"] += 1
        self.counts["num_open_chats"] += bool(turns.spans) and not is_closed
        unwritten = self.unwritten_finder.find(messages, tools, turns.text)
        self.counts["num_system_prompts"] += is_prompted
        self.counts["num_unwritten_system_prompts"] += is_prompted and (SYSTEM, 0) in unwritten
        self.counts["num_unwritten"] += len(unwritten)
        self.tally.unwritten.update(kind for kind, _ in unwritten)
        text, spans = turns.text, turns.spans
        check_characters(text)
        if alphabet := self.tokenizer.alphabet:
            places = alphabet.unknown(text)
            self._count_unknown(text, places)
            if places and alphabet.shifts_offsets:
                text, spans = alphabet.without(text, places, spans)
        return Written(text, spans, turns.follow_prompt)

    def check(self, is_training: bool, num_tokens: int) -> None:
        """Raises UserError if the tokenizer does not know more than MAX_UNKNOWN of the text, and if
        `data.system_prompt` is never written, or no training row uses it. num_tokens: of all documents.
        """
        counts = self.counts
        dropped = counts["num_unknown_characters"] / max(1, counts["num_characters"])
        unknown = counts["num_unknown_tokens"] / max(1, num_tokens)
        if max(dropped, unknown) > MAX_UNKNOWN:
            lost = f"drops {dropped:.1%} of the characters ({self.examples()['examples']} …)"
            if dropped <= MAX_UNKNOWN:
                lost = f"does not know {unknown:.1%} of the tokens"
            raise UserError(
                f"{self.source}: the tokenizer in {self.tokenizer.folder} {lost}; take a model whose "
                "tokenizer knows them, or correct the rows"
            )
        num_prompts = self.counts["num_system_prompts"]
        if is_training and self.system_prompt is not None and not num_prompts:
            raise UserError(
                f"data.system_prompt: every row of {self.source} has a system message of its own; drop "
                "data.system_prompt"
            )
        if num_prompts and self.counts["num_unwritten_system_prompts"] == num_prompts:
            raise UserError(
                "data.system_prompt: the chat template never writes it; set data.chat_template to one that "
                "does, or drop data.system_prompt"
            )

    def examples(self) -> dict[str, str]:
        """What the notes of the report name: characters that are not known, and what is not written."""
        shown = [
            each if each.isprintable() and each != " " else ascii(each) for each in self.tally.characters
        ]
        unwritten = sorted(self.tally.unwritten.items())
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in unwritten)
        return {"examples": " ".join(shown[:8]), "unwritten": left_out}


def _conversation(document: Conversation | Pair) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and tools that the chat template gets."""
    if isinstance(document, Conversation):
        return document.messages, document.tools
    second = "\n" * bool(document.prompt and document.input) + document.input
    messages = [
        *([{"role": "system", "content": document.system}] if document.system else []),
        *document.history,
        {"role": "user", "content": document.prompt + second},
        {"role": "assistant", "content": document.response},
    ]
    return messages, None


def check_characters(text: str) -> None:
    """Raises RowError if `text` has half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise RowError(
            f"holds {half}, half of a surrogate pair, which is not a character; write the whole pair"
        ) from None


def _plain(pair: Pair) -> Written:
    if pair.system or pair.history:
        what = "a system message" if pair.system else "earlier turns"
        raise RowError(
            f"has {what}, which only a chat template writes; set data.chat_template"
            + (", or data.system_column=none to leave it out" if pair.system else "")
        )
    if pair.filled_template is not None:
        prompt = pair.filled_template
    else:
        prompt = "".join(f"{part}\n" for part in (pair.prompt, pair.input) if part)
    return Written(prompt, response=pair.response)
