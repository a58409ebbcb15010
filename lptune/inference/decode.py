"""Decoding: from prompts to answers, one token for each row of a batch at a time.

The first forward runs the prompts and fills the model's cache. Each later forward runs one new token per
row; of a model without a cache, the whole row. A row that has ended runs on, unread, until all rows have; its
answer takes no more tokens.

An answer grows from tokens to text that can be shown at once. A token is not a text. It can end within a
character (the bytes of an emoji are often three tokens), and a tokenizer like sentencepiece drops the space
before the first word of what it decodes. So each new token is decoded together with the tokens of the piece
before it, and the text of that piece is removed. A piece is shown when it ends with a whole character. A stop
text can begin in one token and end in another. So the end of the text is held back as long as a stop text
could begin there.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lptune.data import Tokenizer
from lptune.inference.sampling import Sampler
from lptune.models import Backbone

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not a character (yet)


class Answer:
    """Tokens and text of one answer. Give it tokens by `add` until it `is_done`.

    stop_ids: tokens that end the answer. stop: texts that end it; neither is part of it. max_tokens: the
    answer ends with this number of tokens. after: the tokens of a raw text that the answer continues; its
    first word then keeps the space before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        after: Sequence[int] = (),
    ) -> None:
        self.ids: list[int] = []
        """The tokens, without the end token; with a stop text, also the tokens that have it."""
        self.text = ""
        """The text that is final so far."""
        self.piece = ""
        """The part of `text` that the last token added."""
        self.ended_by = ""
        """Empty while the answer grows; then token | text | length."""
        self._tokenizer, self._stop_ids, self._stop = tokenizer, frozenset(stop_ids), stop
        self.max_tokens = max_tokens
        # The window to decode: a piece that was shown, from 0 to _num_shown, and the tokens after it.
        self._window = list(after)[-8:]
        self._num_shown = len(self._window)
        self._held = ""

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended."""
        return bool(self.ended_by)

    def add(self, token: int) -> None:
        """Takes the next token; sets `piece`, `text` and, at the end, `ended_by`."""
        assert not self.is_done, "the answer has ended"
        if token in self._stop_ids:
            self._end("token")
            return
        self.ids.append(token)
        self._window.append(token)
        if len(self.ids) == self.max_tokens:
            self._end("length")
        else:
            self._show(self._decoded(is_last=False), is_last=False)

    def _end(self, by: str) -> None:
        self.ended_by = by
        self._show(self._decoded(is_last=True), is_last=True)

    def _decoded(self, is_last: bool) -> str:
        """The text of the tokens that were not shown; empty if it ends within a character."""
        shown = self._tokenizer.decode(self._window[: self._num_shown])
        whole = self._tokenizer.decode(self._window)
        if whole.endswith(_INCOMPLETE):
            if not is_last:
                return ""
            whole = whole.rstrip(_INCOMPLETE)  # the answer was cut within a character
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return whole[len(shown) :]

    def _show(self, new: str, is_last: bool) -> None:
        text = self._held + new
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.ended_by = "text"
            self.piece, self._held = text[: min(found)], ""
        else:
            num_held = 0 if is_last else self._num_to_hold(text)
            self.piece, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        self.text += self.piece

    def _num_to_hold(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop text begins."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(len(text), longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


@torch.no_grad()
def decode(
    model: Backbone, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], sample: Sampler
) -> Iterator[None]:
    """Adds tokens to `answers` until all of them are done; yields after each token.

    model: not sharded. prompts: token ids, at least one in each row, of any lengths; without prompts, nothing
    is done. answers: new, one for each prompt. In float32, an answer does not depend on the other rows,
    up to the rounding of logits that tie. Kinds with one scale for all tokens (`int8_tensorwise`) quantize a
    row by the largest value of all.
    """
    rows = [list(prompt) for prompt in prompts]
    device = next(model.parameters()).device
    longest = max(map(len, rows), default=0) + max((answer.max_tokens for answer in answers), default=0)
    cache = None
    while not all(answer.is_done for answer in answers):
        if cache is None or cache.is_outgrown(list(map(len, rows))):
            cache = model.make_cache(len(rows), longest)
            tokens_BS, lengths_B = padded(rows, device)
        else:
            tokens_BS, lengths_B = padded([row[-1:] for row in rows], device)
        next_B = sample(model.next_logits(tokens_BS, lengths_B, cache), rows)
        for row, answer, token in zip(rows, answers, next_B.tolist(), strict=True):
            row.append(token)
            answer.piece = ""
            if not answer.is_done:
                answer.add(token)
        yield


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows, padded on the right with zeros, int64 (B, S), and their lengths, int64 (B,)."""
    lengths_B = torch.tensor([len(row) for row in rows])
    tokens_BS = torch.zeros(len(rows), int(lengths_B.max()), dtype=torch.int64)
    for tokens_S, row in zip(tokens_BS, rows, strict=True):
        tokens_S[: len(row)] = torch.tensor(row)
    return tokens_BS.to(device), lengths_B.to(device)
