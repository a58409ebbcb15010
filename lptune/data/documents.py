"""Documents as flat arrays: all tokens end to end, a flag per token for "is a target", and the start of
each document.

After tokenization there is no Python object per token or document: a billion tokens take 5 GB. The Rust
tokenizer encodes texts in batches, on all cores and without the GIL, while Python renders the next batch.
Each batch becomes arrays at once, so that only a few batches are in memory as objects.

Legend: T tokens, N documents, N1 = N + 1.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from lptune.data.errors import BadRows, RowError
from lptune.data.formats import Format
from lptune.data.joined import Joined
from lptune.data.layout import Layout, Written
from lptune.data.sources import Row
from lptune.data.tokenizer import Tokenizer

BATCH_DOCUMENTS = 2048
BATCH_CHARACTERS = 4 * 1024 * 1024
PIECE_CHARACTERS = 64 * 1024
PIECE_TOKENS = 1024 * 1024
TEXT_SAMPLE_TOKENS = 32

Ids = npt.NDArray[np.int32]


_UNKNOWN: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Tokenized documents of at most seq_len tokens each, with at least one target each."""

    tokens_T: npt.NDArray[np.int32] | Joined
    """With several sources: their arrays, joined."""
    is_target_T: npt.NDArray[np.bool_] | Joined
    """Never set at the first token of a document: no token precedes it to predict it from."""
    offsets_N1: npt.NDArray[np.int64]
    """Document i is tokens_T[offsets_N1[i]:offsets_N1[i + 1]]."""
    answers_N2: npt.NDArray[np.int32]
    """Start and end of the first answer, counted from the document's start."""
    prompt_keys_N: npt.NDArray[np.uint64]
    """Hash of the prompt's tokens (of the whole text for raw text): equal for equal prompts."""

    num_targets_N: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: _UNKNOWN)
    """Number of targets of each document; counted if not given."""
    starts_N: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: _UNKNOWN)
    """Where each document begins in `tokens_T`. Equal to `offsets_N1` unless the documents are a selection
    from a larger array."""

    def __post_init__(self) -> None:
        if self.starts_N is _UNKNOWN:
            object.__setattr__(self, "starts_N", self.offsets_N1[:-1])
        if self.num_targets_N is _UNKNOWN:
            counts = np.zeros(0, dtype=np.int64)
            if len(self.starts_N):
                assert isinstance(self.is_target_T, np.ndarray)  # with several sources the counts are given
                counts = np.add.reduceat(self.is_target_T, self.starts_N, dtype=np.int64)
            object.__setattr__(self, "num_targets_N", counts)

    @property
    def num_documents(self) -> int:
        return len(self.offsets_N1) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document."""
        return np.diff(self.offsets_N1)

    def place(self, number: int) -> tuple[int, int]:
        """Start and end of a document in `tokens_T`."""
        start = int(self.starts_N[number])
        return start, start + int(self.offsets_N1[number + 1] - self.offsets_N1[number])

    def select(self, numbers: npt.NDArray[np.int64]) -> "Documents":
        """The documents `numbers`, in that order. Tokens and targets are not copied; `offsets_N1` counts as
        if the selected documents stood end to end.
        """
        return Documents(
            tokens_T=self.tokens_T, is_target_T=self.is_target_T,
            offsets_N1=offsets_of(self.lengths[numbers]), starts_N=self.starts_N[numbers],
            answers_N2=self.answers_N2[numbers], prompt_keys_N=self.prompt_keys_N[numbers],
            num_targets_N=self.num_targets_N[numbers],
        )  # fmt: skip

    def end_to_end(self, array_T: npt.NDArray[Any] | Joined) -> Iterator[npt.NDArray[Any]]:
        """`array_T` (tokens_T or is_target_T) of these documents in order, in pieces."""
        in_order = self.starts_N.base is self.offsets_N1 or np.array_equal(
            self.starts_N, self.offsets_N1[:-1]
        )
        if in_order and isinstance(array_T, np.ndarray):
            yield array_T[: self.offsets_N1[-1]]
            return
        ends = np.arange(PIECE_TOKENS, int(self.offsets_N1[-1]) + PIECE_TOKENS, PIECE_TOKENS)
        cuts = np.r_[0, np.searchsorted(self.offsets_N1[1:], ends, side="left") + 1]
        for first, stop in itertools.pairwise(np.unique(np.minimum(cuts, self.num_documents)).tolist()):
            offsets = self.offsets_N1[first : stop + 1]
            shifts = np.repeat(self.starts_N[first:stop] - offsets[:-1], np.diff(offsets))
            yield array_T[shifts + np.arange(offsets[0], offsets[-1])]


def offsets_of(lengths_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Starts of documents of these lengths that stand end to end, and the end of the last one."""
    offsets_N1: npt.NDArray[np.int64] = np.r_[0, np.cumsum(lengths_N)].astype(np.int64)
    return offsets_N1


def concatenated(parts: Sequence[Documents]) -> Documents:
    """The documents of all parts, in order."""
    return Documents(
        tokens_T=np.concatenate([np.zeros(0, dtype=np.int32), *(part.tokens_T for part in parts)]),
        is_target_T=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_target_T for part in parts)]),
        offsets_N1=offsets_of(
            np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)])
        ),
        answers_N2=np.concatenate([np.zeros((0, 2), dtype=np.int32), *(part.answers_N2 for part in parts)]),
        prompt_keys_N=np.concatenate([np.zeros(0, dtype=np.uint64), *(part.prompt_keys_N for part in parts)]),
    )


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Counts of truncated, dropped and odd rows, for the report."""

    num_truncated_documents: int = 0
    num_truncated_tokens: int = 0
    num_dropped_documents: int = 0
    """Documents that were dropped because they have no target."""
    num_placeholder_rows: int = 0
    """Rows that hold {{name}}."""
    num_unknown_tokens: int = 0
    """Tokens for characters that the tokenizer does not know (<unk>)."""


def tokenize(
    rows: Iterable[Row],
    fmt: Format,
    layout: Layout,
    tokenizer: Tokenizer,
    bad: BadRows,
    counts: Counts,
    *,
    seq_len: int,
    train_on_prompt: bool = False,
) -> Iterator[Documents]:
    """The documents of `rows`, batch by batch; a batch may have none. Pairs and chats that are longer than
    seq_len lose their end; raw text is cut into chunks without loss. Adds to `counts`.
    """
    builder = _Builder(tokenizer, counts, seq_len, train_on_prompt)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for batch in _batches(_write(rows, fmt, layout, bad, counts)):
            pieces = [_pieces(written, tokenizer) for written in batch]
            texts = [piece for document in pieces for piece in document]
            is_chat = any(written.spans is not None for written in batch)
            future = pool.submit(_encode, texts, tokenizer, is_chat)
            if pending is not None:
                yield builder.build(pending[0], pending[1], pending[2].result())
            pending = (batch, [len(document) for document in pieces], future)
            del batch, pieces, texts
        if pending is not None:
            yield builder.build(pending[0], pending[1], pending[2].result())


def _encode(texts: list[str], tokenizer: Tokenizer, is_chat: bool) -> list[Any]:
    """Encodings for chats, which need the offsets; otherwise int32 arrays of ids, since an encoding takes
    over a hundred bytes per token, and a long text has many pieces.
    """
    if is_chat:
        return [*tokenizer.encode_batch(texts, offsets=True)]
    found: list[Any] = []
    first, size = 0, 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_CHARACTERS or stop == len(texts):
            encodings = tokenizer.encode_batch(texts[first:stop], offsets=False)
            found += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
            first, size = stop, 0
    return found


def _write(
    rows: Iterable[Row], fmt: Format, layout: Layout, bad: BadRows, counts: Counts
) -> Iterator[Written]:
    for row in rows:
        try:
            written = layout.write(fmt.document(row))
        except RowError as problem:
            bad.add(row.place, problem)
            continue
        counts.num_placeholder_rows += not layout.is_text and _has_placeholder(
            written.text + (written.response or "")
        )
        yield written


def _has_placeholder(text: str) -> bool:
    return re.search(r"\{\{\s*\w+\s*\}\}", text) is not None


def _batches(documents: Iterable[Written]) -> Iterator[list[Written]]:
    batch: list[Written] = []
    size = 0
    for written in documents:
        batch.append(written)
        size += len(written.text) + len(written.response or "")
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(written: Written, tokenizer: Tokenizer) -> list[str]:
    """The texts to encode: a whole chat; prompt and response; or raw text, cut for parallel encoding where a
    cut changes no token.
    """
    if written.spans is not None:
        return [written.text]
    if written.response is not None:
        return [written.text, tokenizer.continuation + written.response]
    text, pieces, start = written.text, [], 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        cut = _safe_cut(text, start + PIECE_CHARACTERS, tokenizer)
        if cut is None:
            break
        pieces.append(text[start:cut])
        start = cut
    pieces.append(text[start:])
    return pieces


def _safe_cut(text: str, near: int, tokenizer: Tokenizer) -> int | None:
    """The first end of a line after `near` that no token crosses; None if there is no such place within one
    piece.
    """
    for _ in range(16):
        near = text.find("\n", near, near + PIECE_CHARACTERS) + 1
        if near == 0:
            return None
        left, right = text[near - 128 : near], text[near : near + 128]
        if right and not right[0].isspace():
            joint = tokenizer.encode(left + right, add_special=False)
            if joint == tokenizer.encode(left, add_special=False) + tokenizer.encode(
                right, add_special=False
            ):
                return near
    return None


class _Builder:
    """Makes documents of encodings, batch by batch."""

    def __init__(self, tokenizer: Tokenizer, counts: Counts, seq_len: int, train_on_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.train_on_prompt = train_on_prompt
        self.counts = counts
        names = tokenizer.special_tokens
        unknown = names.get("unk_token")
        if unknown in (names.get("bos_token"), names.get("eos_token"), names.get("pad_token")):
            unknown = None  # byte-level classes use the name for <|endoftext|>; they know every character
        self._unknown_id = None if unknown is None else tokenizer.backend.token_to_id(unknown)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._targets: list[npt.NDArray[np.bool_]] = []
        self._answers: list[tuple[int, int]] = []
        self._keys: list[int] = []

    def build(self, batch: list[Written], num_pieces: list[int], encoded: list[Any]) -> Documents:
        """The documents of one batch; document i takes the next `num_pieces[i]` items of `encoded`."""
        place = 0
        for written, count in zip(batch, num_pieces, strict=True):
            own = encoded[place : place + count]
            place += count
            if written.spans is not None:
                self._add_chat(written.spans, own[0])
            elif written.response is not None:
                self._add_pair(own[0], own[1])
            else:
                self._add_text(own)
        documents = Documents(
            tokens_T=np.concatenate([*self._tokens, np.zeros(0, dtype=np.int32)]),
            is_target_T=np.concatenate([*self._targets, np.zeros(0, dtype=np.bool_)]),
            offsets_N1=offsets_of(np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)),
            answers_N2=np.array(self._answers, dtype=np.int32).reshape(-1, 2),
            prompt_keys_N=np.array(self._keys, dtype=np.uint64),
        )
        self._clear()
        return documents

    def _closing(self) -> tuple[int, ...]:
        eos, suffix = self.tokenizer.eos_id, self.tokenizer.suffix_ids
        return suffix if eos is None or eos in suffix else (*suffix, eos)

    def _around(self, *ids: Ids) -> Ids:
        """`ids` with the tokens that the tokenizer puts before and after a text."""
        before, after = self.tokenizer.prefix_ids, self._closing()
        return np.concatenate([np.array(before, np.int32), *ids, np.array(after, np.int32)])

    def _add_text(self, ids: list[Ids]) -> None:
        tokens = self._around(*ids)
        key = _key(tokens)
        if len(tokens) < 2:
            self.counts.num_dropped_documents += 1
        # A chunk starts with the last token of the chunk before, which is no target there again: each token
        # is a target once.
        for start in range(0, len(tokens) - 1, self.seq_len - 1):
            chunk = tokens[start : start + self.seq_len]
            is_target = np.ones(len(chunk), dtype=np.bool_)
            prompt = max(1, min(TEXT_SAMPLE_TOKENS, len(chunk) // 2))
            self._append(chunk, is_target, (prompt, len(chunk)), key)

    def _add_pair(self, prompt: Ids, response: Ids) -> None:
        first = len(self.tokenizer.prefix_ids) + len(prompt)
        tokens = self._around(prompt, response[1:] if self.tokenizer.continuation else response)
        self._add_answered(tokens, np.arange(len(tokens)) >= first)

    def _add_chat(self, spans: list[tuple[int, int]], encoding: Any) -> None:
        tokens = np.array(encoding.ids, dtype=np.int32)
        is_target = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in spans:
            first, end = _token_span(encoding, start, stop)
            is_target[first:end] = True
        self._add_answered(tokens, is_target)

    def _add_answered(self, tokens: npt.NDArray[np.int32], is_target: npt.NDArray[np.bool_]) -> None:
        targets = np.flatnonzero(is_target)
        if not len(targets):
            self.counts.num_dropped_documents += 1
            return
        first = int(targets[0])
        gaps = np.flatnonzero(np.diff(targets) > 1)
        end = int(targets[gaps[0] if len(gaps) else -1]) + 1
        key = _key(tokens[:first])
        if len(tokens) > self.seq_len:
            self.counts.num_truncated_documents += 1
            self.counts.num_truncated_tokens += len(tokens) - self.seq_len
            tokens, is_target = tokens[: self.seq_len], is_target[: self.seq_len]
        if self.train_on_prompt:
            is_target[:] = True
        if not is_target[1:].any():
            self.counts.num_dropped_documents += 1
            return
        self._append(tokens, is_target, (min(first, len(tokens)), min(end, len(tokens))), key)

    def _append(
        self,
        tokens: npt.NDArray[np.int32],
        is_target: npt.NDArray[np.bool_],
        answer: tuple[int, int],
        key: int,
    ) -> None:
        is_target[0] = False
        if self._unknown_id is not None:
            self.counts.num_unknown_tokens += int((tokens == self._unknown_id).sum())
        self._tokens.append(tokens)
        self._targets.append(is_target)
        self._answers.append(answer)
        self._keys.append(key)


def _token_span(encoding: Any, start: int, stop: int) -> tuple[int, int]:
    """The range of tokens that hold a character of text[start:stop]; may be empty."""
    first, last = None, None
    while start < stop and (first := encoding.char_to_token(start)) is None:
        start += 1  # the tokenizer's normalizer drops this character
    while start < stop and (last := encoding.char_to_token(stop - 1)) is None:
        stop -= 1
    if first is None or last is None:
        return 0, 0
    end = int(last) + 1
    num_tokens = len(encoding)
    while end < num_tokens and (chars := encoding.token_to_chars(end)) is not None and chars[0] < stop:
        end += 1  # more tokens of the same character (bytes of an emoji)
    return int(first), end


def _key(tokens: npt.NDArray[np.int32]) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")
