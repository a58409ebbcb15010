"""Conversations as their chat template writes them: the characters that the assistant writes, the tokens that
end an answer, and the parts that are left out.

If the template has `{% generation %}` marks, they tell what the assistant writes. Otherwise the conversation
is rendered step by step: the text of `messages[:i]` with the generation prompt is the input of the model
before turn i; the text of `messages[:i+1]` is the text after turn i; the difference is turn i. A turn ends
with the token that closes it (`<|im_end|>`, `</s>`), which is a target, because the model must learn to stop.
White space after that token belongs to the template.

Some templates need more than this difference. There are three cases, and each has an exact solution:
- The template ignores `add_generation_prompt`, or its prompt opens reasoning (`<think>`) that earlier turns
  do not show. Then the whole conversation is rendered twice with two other contents for the turn: the part
  that differs is the turn.
- It always writes the assistant's header at the end (Llama 3 once did). Then the turn ends with the first
  special token after its content.
- It rewrites earlier turns (Qwen3 drops their reasoning). Then the text after the turn is not a prefix of the
  whole. The text that follows both other contents follows the turn; if that fails, the turn ends at the first
  closing text after its start, which a probe conversation shows.
In any other case an error of one line asks for marks; the code never guesses.

A base model that learns chats closes its answers with the template's `<|im_end|>`, which no file of the base
may name as an end. An export therefore adds the tokens that were learned to generation_config.json.

Many templates silently drop parts that they do not support: a system message, the result of a tool,
reasoning. A part counts as written if the rendered text contains it, or if the text changes when the part
changes.

Legend: T tokens, N documents.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lptune.base.model_folder import read_stop_ids
from lptune.data.documents import PIECE_TOKENS
from lptune.data.errors import RowError
from lptune.data.messages import REASONING_KEYS, inline_calls
from lptune.data.rows import Rows
from lptune.data.templates import ChatTemplate, Message, Messages, Part, Rendered
from lptune.data.tokenizer import Tokenizer

# Two contents with different first and last characters, which no template treats specially.
_PROBES = ("qzx assistant probe zxq", "vjk assistant probe kjv")
_MAX_PARTS = 16
"""Beginnings of a conversation that one question asks for: of longer ones, their own time is what counts."""
_ASK_FOR_MARKS = (
    "put {% generation %} … {% endgeneration %} around the assistant's text in data.chat_template"
)


class Turns(NamedTuple):
    """A rendered conversation with the spans of the assistant."""

    text: str
    spans: list[tuple[int, int]]
    """Character spans, in order, one per assistant turn (or per mark)."""
    num_rewritten: int
    """Number of turns that the template writes differently when the conversation goes on."""
    follow_prompt: list[bool]
    """For each span, whether the text before it is the prompt that a model gets to write it."""
    is_closed: bool
    """Whether the last span ends with a special token, by which the model learns to stop."""


class TurnFinder:
    """Finds the assistant's turns in conversations rendered by one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._closings: dict[str, _Closing | None] = {}
        self._prompts: dict[str, str | None] = {}
        self._beginnings: dict[Part, str] = {}

    def find(
        self, messages: Messages, tools: Messages | None = None, rendered: Sequence[Rendered] = ()
    ) -> Turns:
        """Renders `messages` and finds the spans of the assistant. Raises RowError if they cannot be found
        exactly. rendered: `parts`, if they are rendered already.
        """
        parts = self.parts(messages, tools)
        rendered = rendered or self.template.render_parts(messages, tools, parts)
        self._beginnings = {part: each.text for part, each in zip(parts, rendered, strict=False)}
        whole = rendered[0]
        if self.template.has_marks(tools):
            marks = [mark for mark in _marks_to_learn(whole.marks, messages) if mark[0] < mark[1]]
            prompt = self._generation_prompt(tools) or ""
            follow = [bool(prompt) and whole.text.endswith(prompt, 0, start) for start, _ in marks]
            return Turns(whole.text, marks, 0, follow, self._is_closed(whole.text, marks, tools))
        spans: list[tuple[int, int]] = []
        follow = []
        num_rewritten = 0
        for i, message in enumerate(messages):
            if not _is_learned(message):
                continue
            start, follows = self._start(whole.text, messages, tools, i)
            stop, rewritten = self._stop(whole, messages, tools, i, start)
            if spans and start < spans[-1][1]:
                raise RowError(f"the assistant's turns overlap in the rendered text; {_ASK_FOR_MARKS}")
            spans.append((start, stop))
            follow.append(follows)
            num_rewritten += rewritten
        return Turns(whole.text, spans, num_rewritten, follow, self._is_closed(whole.text, spans, tools))

    def parts(self, messages: Messages, tools: Any) -> list[Part]:
        """The whole conversation, and the beginnings that most templates need, for one question."""
        last = len(messages)
        parts = [(last, False)]
        for i in range(last) if not self.template.has_marks(tools) else ():
            if _is_learned(messages[i]) and len(parts) < _MAX_PARTS:
                parts += [(i, True), (i + 1, False)] if i + 1 < last else [(i, True)]
        return [part for part in parts if part[0]]

    def _begun(self, messages: Messages, tools: Any, upto: int, prompt: bool) -> str | None:
        """The text of messages[:upto]; None if the template refuses it."""
        known = self._beginnings.get((upto, prompt))
        return self.template.attempt(messages[:upto], tools, prompt=prompt) if known is None else known

    def _is_closed(self, text: str, spans: Sequence[tuple[int, int]], tools: Any) -> bool:
        stop = spans[-1][1] if spans else 0
        ended, closing = text[:stop].rstrip(), self.closing_token(tools)
        # Another token at the end, such as </tool_call>, is the answer's own.
        if closing is not None and text[stop:].lstrip().startswith(closing):
            return ended.endswith(closing)
        return self._ends_special(ended) and (closing is not None or self._closing(tools) is None)

    def _start(self, whole: str, messages: Messages, tools: Any, i: int) -> tuple[int, bool]:
        """Where turn i starts, and whether the text before it is the prompt for it."""
        given = self._begun(messages, tools, i, True) if i else None
        is_prefix = given is not None and whole.startswith(given)
        if given is not None and is_prefix and self._generation_prompt(tools) != "":
            return len(given), True
        # Without a generation prompt, the turn starts where its content does, or its reasoning before that.
        texts = [str(messages[i].get(key, "")).strip() for key in REASONING_KEYS]
        for before, _ in self._around(messages, tools, i):
            own = before[_common_prefix(before, given or "") :]
            # A space before the content is part of its first token in many tokenizers.
            spaced = given is not None and is_prefix and before.startswith(given) and not own.strip()
            start = len(given) if given is not None and spaced else len(before)
            if whole.startswith(before) and not any(text and text in own for text in texts):
                return start, is_prefix and start == len(given or "")
            if spaced and messages[i].get("tool_calls"):  # a call has no space before it
                return start, True
        # The prompt closes its reasoning and this turn shows some: they part behind `<think>`.
        earlier = self._begun(messages, tools, i, False) if i else None
        if given is not None and earlier is not None and given.startswith(earlier):
            start = _common_prefix(given, whole)
            if start > len(earlier) and whole[start - 1] in ">\n":
                return start, False
        raise RowError(
            f"the start of assistant message {i + 1} cannot be found in the chat template's text; "
            f"{_ASK_FOR_MARKS}"
        )

    def _stop(self, whole: Rendered, messages: Messages, tools: Any, i: int, start: int) -> tuple[int, bool]:
        closing = self._closing(tools)
        last = i == len(messages) - 1
        upto = whole.text if last else self._begun(messages, tools, i + 1, False)
        if upto is not None and len(upto) >= start and whole.text.startswith(upto):
            if closing is None:
                return len(upto) - len(_after_special(upto[start:], self.template.special_texts)), False
            if upto.endswith(closing.tail):
                text = closing.last if last else closing.text
                return max(start, len(upto) - len(closing.tail) + len(text)), False
            # A call may end differently from an answer: in Llama 3 <|eom_id|>, in Gemma 4 <|tool_response>.
            end = len(upto.rstrip())
            if messages[i].get("tool_calls") and end > start and self._ends_special(upto):
                return end, False
        for _, after in self._around(messages, tools, i):
            if closing is None or after is None or not after.startswith(closing.text):
                continue
            end = len(whole.text) - len(after)
            if end >= start and whole.text.endswith(after):
                return end + len(closing.text), not last
        if closing is None or closing.text not in whole.text[start:]:
            raise RowError(
                f"the end of assistant message {i + 1} cannot be found in the chat template's text; "
                f"{_ASK_FOR_MARKS}"
            )
        content = messages[i].get("content")
        if not closing.text.strip() or (isinstance(content, str) and closing.text in content):
            raise RowError(
                f"assistant message {i + 1} holds the text {closing.text!r} that closes a turn, and the chat "
                f"template rewrites earlier turns, so that its end cannot be found; {_ASK_FOR_MARKS}"
            )
        return whole.text.index(closing.text, start) + len(closing.text), not last

    def _ends_special(self, text: str) -> bool:
        stripped = text.rstrip()
        return any(token and stripped.endswith(token) for token in self.template.special_texts)

    def _around(self, messages: Messages, tools: Any, i: int) -> Iterator[tuple[str, str | None]]:
        """The text before and after the content of message i, as far as it does not depend on the content.
        The second is None if the whole conversation has another text there.
        """
        plain, rest = {"role": "assistant"}, messages[i + 1 :]
        # With tool calls: some templates refuse the result of a tool without a call before it.
        for message, following in ((plain, rest), (messages[i], rest), (plain, [])):
            texts = [
                self.template.attempt([*messages[:i], {**message, "content": probe}, *following], tools)
                for probe in _PROBES
            ]
            if texts[0] is None or texts[1] is None:
                continue
            start = _common_prefix(texts[0], texts[1])
            before, after = texts[0][:start], texts[0][start + len(_PROBES[0]) :]
            if texts == [before + probe + after for probe in _PROBES]:
                yield before, after if len(following) == len(rest) else None

    def _closing(self, tools: Any) -> "_Closing | None":
        source = self.template.source(tools)
        if source not in self._closings:
            self._closings[source] = self._probe_closing(tools)
        return self._closings[source]

    def _generation_prompt(self, tools: Any) -> str | None:
        """What `add_generation_prompt` writes after a question, "" if nothing; None if that is not known."""
        source = self.template.source(tools)
        if source not in self._prompts:
            user = [{"role": "user", "content": "question"}]
            without, given = (self.template.attempt(user, tools, prompt=prompt) for prompt in (False, True))
            if without is None or given is None or not given.startswith(without):
                self._prompts[source] = None
            else:
                self._prompts[source] = given[len(without) :]
        return self._prompts[source]

    def closing_token(self, tools: Any = None) -> str | None:
        """The special token that ends an assistant turn; None if there is none (a model would not learn to
        stop).
        """
        closing = self._closing(tools)
        text = closing.last if closing else ""
        return next((token for token in self.template.special_texts if token and text.endswith(token)), None)

    def _probe_closing(self, tools: Any) -> "_Closing | None":
        """The text that follows the content of an assistant turn in a conversation of three messages."""
        user, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBES[0]}
        said = [user, answer, user]
        ended, continued = (self.template.attempt(said[:count], tools) for count in (2, 3))
        if ended is None or _PROBES[0] not in ended:
            return None
        tail = ended.rpartition(_PROBES[0])[2]
        text = last = tail
        if continued is not None and _PROBES[0] in continued:
            next_text = continued.rpartition(_PROBES[0])[2]
            if not next_text.startswith(tail):
                text = tail[: _common_prefix(tail, next_text)]
                rest = tail[len(text) :]
                text = _first_special(text, self.template.special_texts)
                # The template appends the header in any case, or it closes the last turn in another way.
                if (self.template.attempt([user], tools) or rest).endswith(rest):
                    last = text
        special = self.template.special_texts
        return _Closing(tail, *(each[: -len(_after_special(each, special)) or None] for each in (text, last)))


class _Closing(NamedTuple):
    tail: str
    """Everything that the template writes after the content of the last turn."""
    text: str
    """The part of `tail` that belongs to a turn: up to and including the closing token."""
    last: str
    """The same of the last turn, which some templates alone close with a token."""


def _is_learned(message: Message) -> bool:
    """Whether `message` is one of the assistant with a `weight` other than 0."""
    return message.get("role") == "assistant" and message.get("weight", 1) != 0


def _marks_to_learn(marks: list[tuple[int, int]], messages: Messages) -> list[tuple[int, int]]:
    """`marks` without those of messages of weight 0. Raises RowError if these cannot be identified."""
    answers = [message for message in messages if message.get("role") == "assistant"]
    if all(_is_learned(message) for message in answers):
        return marks
    if len(marks) != len(answers):
        raise RowError(
            f"has a message of weight 0, and the chat template marks {len(marks)} spans in {len(answers)} "
            "assistant messages, so that it is unclear which to leave out; remove the weight"
        )
    return [mark for mark, message in zip(marks, answers, strict=True) if _is_learned(message)]


def _after_special(text: str, special_texts: frozenset[str]) -> str:
    """White space at the end of `text`, if a special token stands right before it; otherwise empty."""
    stripped = text.rstrip()
    ends_special = any(token and stripped.endswith(token) for token in special_texts)
    return text[len(stripped) :] if ends_special else ""


def _first_special(text: str, special_texts: frozenset[str]) -> str:
    """`text` up to the end of its first special token; all of it if it has none."""
    ends = [
        (text.index(token), text.index(token) + len(token))
        for token in special_texts
        if token and token in text
    ]
    return text[: min(ends)[1]] if ends else text


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is fast, comparing characters in
    Python is not.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer: those of generation_config.json or, if it has none, of config.json; the
    tokenizer's end token; the token that closes the assistant's turn in the chat template; and, for the
    checkpoint of a run, those that its rows taught.
    """
    found = {*read_stop_ids(tokenizer.folder), *tokenizer.learned_stops, *_closing_ids(tokenizer)}
    return sorted(found)


def learned_stops(rows: Rows, tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens that end the answers of `rows` and are learned there: text -> id. Empty if the model
    does not learn to stop.

    An answer ends where its targets do. A row may have answers that end differently: a tool call of Llama 3
    ends with <|eom_id|>. Where prompts are learned, too, the targets do not show where an answer ends, so the
    tokenizer's end token and that of the chat template count wherever they are targets. The end of a document
    of `seq_len` tokens, and of a part of a text, does not count for others: the text may be cut there.
    """
    texts = tokenizer.template.special_texts if tokenizer.template else tokenizer.special_texts
    texts -= {tokenizer.special_tokens.get("unk_token", "")}
    ids = (tokenizer.backend.token_to_id(text) for text in texts)
    special = {each for each in ids if each is not None}
    closing = _closing_ids(tokenizer)
    documents, found = rows.documents, set[int]()
    is_cut_N = (documents.lengths >= rows.seq_len) | documents.goes_on
    cut_N = documents.offsets_N1[1:][is_cut_N] - 1
    start = 0
    pieces = (documents.end_to_end(array) for array in (documents.tokens_T, documents.is_target_T))
    for all_tokens_T, all_targets_T in zip(*pieces, strict=True):
        for first in range(0, len(all_tokens_T), PIECE_TOKENS):
            stop = first + PIECE_TOKENS
            tokens_T, is_target_T = all_tokens_T[first:stop], all_targets_T[first:stop]
            is_end_T = is_target_T.copy()
            next_T = all_targets_T[first + 1 : stop + 1]  # the first token of a document is no target
            is_end_T[: len(next_T)] &= ~next_T
            here_N = cut_N[np.searchsorted(cut_N, start) : np.searchsorted(cut_N, start + len(tokens_T))]
            is_end_T[here_N - start] = False
            found |= special & set(np.unique(tokens_T[is_end_T]).tolist())
            found |= {each for each in closing - found if (is_target_T & (tokens_T == each)).any()}
            start += len(tokens_T)
    return {str(tokenizer.backend.id_to_token(each)): each for each in sorted(found)}


def _closing_ids(tokenizer: Tokenizer) -> set[int]:
    """The tokenizer's end token, and the token that closes the assistant's turn in the chat template."""
    found = {tokenizer.eos_id}
    if tokenizer.template is not None:
        closing = TurnFinder(tokenizer.template).closing_token()
        found.add(None if closing is None else tokenizer.backend.token_to_id(closing))
    return {each for each in found if each is not None}


_PROBE = "qzx another text zxq"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "qzx_tool",
        "description": _PROBE,
        "parameters": {"type": "object", "properties": {}},
        "arguments": {"qzx": 1},
    },
}
"""Used both as a tool call and as the definition of a tool."""
_SURE_CHARACTERS = 16
"""Length from which a text is not contained in a conversation by accident."""
_KINDS = {"system": "system messages", "user": "user messages", "tool": "tool results"}
SYSTEM = _KINDS["system"]
TOOLS = "tool definitions"


class UnwrittenFinder:
    """Finds what one template leaves out of its conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._written: dict[tuple[Any, ...], bool] = {}

    def find(self, messages: Messages, tools: Any, text: str) -> list[tuple[str, int]]:
        """The parts of `messages` that are missing in `text`, the rendering: (kind such as `system messages`,
        number of the message). Tool definitions have the number -1.
        """
        found = [
            (kind, i)
            for i in range(len(messages))
            for kind, key, probe in _parts(messages[i])
            if not self._is_written(messages, tools, text, i, key, probe)
        ]
        if tools and self._template.attempt(messages, [*tools, _PROBE_TOOL]) == text:
            found.append((TOOLS, -1))
        return found

    def with_calls(self, messages: Sequence[dict[str, Any]], tools: Any) -> Sequence[dict[str, Any]]:
        """`messages`, in which each tool call that the template does not write stands in the content, as JSON
        text. Many templates write calls under a condition: with tools, without a content.
        """
        calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if calling and "tool_calls" not in self._template.source(tools):
            return inline_calls(messages)
        text = self._template.attempt(messages, tools) if calling else None
        out = [*messages]
        for i in calling if text is not None else ():
            changed = [*messages[:i], {**messages[i], "tool_calls": [_PROBE_TOOL]}, *messages[i + 1 :]]
            if self._template.attempt(changed, tools) == text:
                out[i : i + 1] = inline_calls(messages[i : i + 1])
        return out

    def _is_written(self, messages: Messages, tools: Any, text: str, i: int, key: str, probe: Any) -> bool:
        value = messages[i][key]
        is_long = isinstance(value, str) and len(value) >= _SURE_CHARACTERS
        if is_long and value.strip() in text:
            return True
        # How a template treats a short text, or a call, depends on the position of the message.
        around = [messages[j].get("role") if 0 <= j < len(messages) else None for j in (i - 1, i, i + 1)]
        place = (key, bool(tools), i == 0, *around, *sorted(messages[i]))
        if is_long or place not in self._written:
            changed = [*messages]
            changed[i] = {**messages[i], key: probe}
            self._written[place] = self._template.attempt(changed, tools) != text
        return self._written[place]


def _parts(message: Message) -> Iterator[tuple[str, str, Any]]:
    """The parts of a message that should be written: (name of the part, key, another value for a test)."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) and content.strip():
        yield _KINDS.get(str(role), "texts of assistant messages"), "content", _PROBE
    if role != "assistant":
        return
    key = next((key for key in REASONING_KEYS if message.get(key) is not None), None)
    if key is not None and isinstance(message[key], str) and message[key].strip():
        yield "reasoning texts", key, _PROBE
    if message.get("tool_calls"):
        yield "tool calls", "tool_calls", [_PROBE_TOOL]
