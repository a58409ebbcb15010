"""From source rows to documents: writes each row as text, tokenizes it, and marks its targets.

The rows are those of one chunk (workers.py). All of its texts are tokenized together and become arrays
(documents.py) at once, so that only one chunk is in memory as objects.

A preference becomes two documents, first the chosen answer, then the rejected one. They share the prompt's
key and a packed row, and neither is ever cut: a part of an answer has another probability. Nor is an answer
with a label.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lptune.base.errors import UserError
from lptune.base.files import MEBI
from lptune.data.documents import Documents, offsets_of
from lptune.data.errors import BadRows, RowError, Skipped
from lptune.data.formats import Document, Format
from lptune.data.layout import Layout, Written
from lptune.data.sources import Row
from lptune.data.tokenizer import Tokenizer

ROWS_PER_QUESTION = 128
BATCH_CHARACTERS = 4 * MEBI
PIECE_CHARACTERS = 64 * 1024
TEXT_SAMPLE_TOKENS = 32
_JOINT_CHARACTERS = 16

Item = Row | Skipped | UserError
"""A row of a source or, in its place, what went wrong in reading it."""
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def tokenize(items: Iterable[Item], fmt: Format, layout: Layout, bad: BadRows, *, seq_len: int) -> Documents:
    """The documents of rows; there may be none. Pairs and chats that are longer than seq_len lose their
    end; raw text is cut into chunks without loss. A preference gives two documents, or none if these are
    longer than seq_len together; an answer with a label gives none if its document is longer than seq_len.
    Adds to `layout.tally`.
    """
    written = [*_write(items, fmt, layout, bad)]
    pieces = [_pieces(each, layout.tokenizer) for each in written]
    texts = [piece for document in pieces for piece in document]
    encoded = _encode(texts, layout.tokenizer, is_chat=any(each.spans is not None for each in written))
    return _Builder(layout, seq_len).build(written, [len(document) for document in pieces], encoded)


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


def _write(items: Iterable[Item], fmt: Format, layout: Layout, bad: BadRows) -> Iterator[Written]:
    items = iter(items)
    while some := list(itertools.islice(items, ROWS_PER_QUESTION)):
        read = [_read(item, fmt) if isinstance(item, Row) else [] for item in some]
        layout.render_ahead(
            document for found in read if not isinstance(found, RowError) for document, _ in found
        )
        for row, found in zip(some, read, strict=True):
            if isinstance(row, UserError):
                raise row
            if isinstance(row, Skipped):
                bad.skip(*row)
                continue
            layout.counts["num_null_fields"] += row.num_left_out
            try:
                if isinstance(found, RowError):
                    raise found
                written = [layout.write(document)._replace(label=label) for document, label in found]
            except RowError as problem:
                bad.add(row.place, problem)
                continue
            if fmt.is_unpaired and written[0]._replace(label=False) == written[1]:
                layout.counts["num_equal_preferences"] += 1
                continue
            if not layout.is_text and _has_placeholder(written[0].text + (written[0].response or "")):
                layout.counts["num_placeholder_rows"] += 1
            if fmt.rejected and not fmt.is_unpaired:
                yield written[0]._replace(rejected=written[1])
            else:
                yield from written


def _read(row: Row, fmt: Format) -> list[tuple[Document, bool | None]] | RowError:
    """The documents of a row with their labels, or why there are none."""
    try:
        if fmt.label or fmt.is_unpaired:
            return [*fmt.labelled(row)]
        if fmt.rejected:
            return [(document, None) for document in fmt.preference(row)]
        return [(fmt.document(row), None)]
    except RowError as problem:
        return problem


def _has_placeholder(text: str) -> bool:
    return re.search(r"\{\{\s*\w+\s*\}\}", text) is not None


def _pieces(written: Written, tokenizer: Tokenizer) -> list[str]:
    """The texts to encode: a whole chat; prompt and response; or raw text, cut for parallel encoding where a
    cut changes no token.
    """
    if written.rejected is not None:
        both = (written._replace(rejected=None), written.rejected)
        return [piece for each in both for piece in _pieces(each, tokenizer)]
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
    """Makes the documents of one chunk of its encodings."""

    def __init__(self, layout: Layout, seq_len: int) -> None:
        self.tokenizer, self.counts, self.seq_len = layout.tokenizer, layout.counts, seq_len
        self.train_on_prompt = layout.train_on_prompt
        names = self.tokenizer.special_tokens
        unknown = names.get("unk_token")
        if unknown in (names.get("bos_token"), names.get("eos_token"), names.get("pad_token")):
            unknown = None  # byte-level classes use the name for <|endoftext|>; they know every character
        self._unknown_id = None if unknown is None else self.tokenizer.backend.token_to_id(unknown)
        self._tokens: list[Ids] = []
        self._targets: list[Mask] = []
        self._answers: list[tuple[int, int]] = []
        self._keys: list[int] = []
        self._labels: list[bool] = []

    def build(self, batch: list[Written], num_pieces: list[int], encoded: list[Any]) -> Documents:
        """The documents of `batch`; document i takes the next `num_pieces[i]` items of `encoded`."""
        place = 0
        for written, count in zip(batch, num_pieces, strict=True):
            own = encoded[place : place + count]
            place += count
            if written.rejected is not None:
                half = count // 2
                self._add_preference(
                    self._answered(written, own[:half]), self._answered(written.rejected, own[half:])
                )
            elif written.label is not None:
                self._add_labelled(*self._answered(written, own), written.label)
            elif written.spans is None and written.response is None:
                self._add_text(own)
            else:
                self._add_answered(*self._answered(written, own))
        return Documents(
            tokens_T=np.concatenate([*self._tokens, np.zeros(0, dtype=np.int32)]),
            is_target_T=np.concatenate([*self._targets, np.zeros(0, dtype=np.bool_)]),
            offsets_N1=offsets_of(np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)),
            answers_N2=np.array(self._answers, dtype=np.int32).reshape(-1, 2),
            prompt_keys_N=np.array(self._keys, dtype=np.uint64),
            is_desirable_N=np.array(self._labels, dtype=np.bool_),
        )

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
            self.counts["num_dropped_documents"] += 1
        # A chunk starts with the last token of the chunk before, which is no target there again: each token
        # is a target once.
        for start in range(0, len(tokens) - 1, self.seq_len - 1):
            chunk = tokens[start : start + self.seq_len]
            is_target = np.ones(len(chunk), dtype=np.bool_)
            prompt = max(1, min(TEXT_SAMPLE_TOKENS, len(chunk) // 2))
            self._append(chunk, is_target, (prompt, len(chunk)), key)

    def _answered(self, written: Written, own: list[Any]) -> tuple[Ids, Mask]:
        """The tokens of a chat or a pair, and which of them the assistant writes."""
        if written.spans is None:
            prompt, response = own
            first = len(self.tokenizer.prefix_ids) + len(prompt)
            tokens = self._around(prompt, response[1:] if self.tokenizer.continuation else response)
            return tokens, np.arange(len(tokens)) >= first
        (encoding,) = own
        assert written.follow_prompt is not None
        text, spans = written.text, zip(written.spans, written.follow_prompt, strict=True)
        # A model gets the tokens of the prompt alone, and goes on behind them.
        cuts = [start for (start, _), follows in spans if follows and self._is_joined(encoding, text, start)]
        self.counts["num_joined_answers"] += len(cuts)
        bounds, before = list(itertools.pairwise([0, *cuts, len(text)])), self.tokenizer.continuation
        if cuts:
            own = self.tokenizer.encode_batch([before * bool(a) + text[a:b] for a, b in bounds])
        ids: list[Ids] = []
        masks: list[Mask] = []
        for encoding, (begin, end) in zip(own, bounds, strict=True):
            moved, added = (begin - len(before), bool(before)) if begin else (0, 0)
            mask = np.zeros(len(encoding), dtype=np.bool_)
            for start, stop in written.spans:
                if begin <= start < end:
                    first, last = _token_span(encoding, start - moved, stop - moved)
                    mask[first:last] = True
            ids.append(np.array(encoding.ids, dtype=np.int32)[added:])
            masks.append(mask[added:])
        return np.concatenate(ids), np.concatenate(masks)

    def _is_joined(self, encoding: Any, text: str, start: int) -> bool:
        """Whether text[:start] has other tokens alone than in `encoding`, the encoding of `text`."""
        token = encoding.char_to_token(start)
        if token is not None and encoding.token_to_chars(token)[0] < start:
            return True
        if not text[max(0, start - 2) : start].isspace():
            return False
        # Tokenizers like GPT-2's keep the last white space before a word apart from the others.
        begin = max(0, start - _JOINT_CHARACTERS)
        alone = self.tokenizer.encode(text[begin:start], add_special=False)
        both = self.tokenizer.encode(text[begin : start + _JOINT_CHARACTERS], add_special=False)
        return both[: len(alone)] != alone

    def _add_preference(self, chosen: tuple[Ids, Mask], rejected: tuple[Ids, Mask]) -> None:
        both = (chosen, rejected)
        if not all(is_target[1:].any() for _, is_target in both):
            self.counts["num_unlearned_documents"] += 2
        elif np.array_equal(chosen[0], rejected[0]):
            self.counts["num_equal_preferences"] += 1
        elif sum(len(tokens) for tokens, _ in both) > self.seq_len:
            self.counts["num_long_preferences"] += 1
        else:
            first, _ = _first_answer(chosen[1])
            key = _key(chosen[0][:first])
            for tokens, is_target in both:
                self._append(tokens, is_target, _first_answer(is_target), key)

    def _add_labelled(self, tokens: Ids, is_target: Mask, label: bool) -> None:
        if not is_target[1:].any():
            self.counts["num_unlearned_documents"] += 1
        elif len(tokens) > self.seq_len:
            self.counts["num_long_answers"] += 1
        else:
            first, end = _first_answer(is_target)
            self._append(tokens, is_target, (first, end), _key(tokens[:first]), label)

    def _add_answered(self, tokens: Ids, is_target: Mask) -> None:
        if not is_target.any():
            self.counts["num_unlearned_documents"] += 1
            return
        first, end = _first_answer(is_target)
        key = _key(tokens[:first])
        if len(tokens) > self.seq_len:
            self.counts["num_truncated_documents"] += 1
            self.counts["num_truncated_tokens"] += len(tokens) - self.seq_len
            tokens, is_target = tokens[: self.seq_len], is_target[: self.seq_len]
        if self.train_on_prompt:
            is_target[:] = True
        if not is_target[1:].any():
            self.counts["num_dropped_documents"] += 1
            return
        self._append(tokens, is_target, (min(first, len(tokens)), min(end, len(tokens))), key)

    def _append(
        self, tokens: Ids, is_target: Mask, answer: tuple[int, int], key: int, label: bool = True
    ) -> None:
        is_target[0] = False
        if self._unknown_id is not None:
            self.counts["num_unknown_tokens"] += int((tokens == self._unknown_id).sum())
        self._tokens.append(tokens)
        self._targets.append(is_target)
        self._answers.append(answer)
        self._keys.append(key)
        self._labels.append(label)


def _first_answer(is_target: Mask) -> tuple[int, int]:
    """Start and end of the first run of targets. There is at least one."""
    targets = np.flatnonzero(is_target)
    gaps = np.flatnonzero(np.diff(targets) > 1)
    return int(targets[0]), int(targets[gaps[0] if len(gaps) else -1]) + 1


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


def _key(tokens: Ids) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")
