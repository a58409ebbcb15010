"""Shows documents as text: what the model reads, and which tokens the loss counts.

The loss counts a token if it is a target: the model learns to predict it from the tokens before it. The rest
of a document, its context, is only read. A wrong chat template shows here at once: as a prompt among the
targets, or as an answer whose end is not one.

The text of a document is the decoded text of all its tokens. It is cut where targets, context and special
tokens meet, and each part is marked. A tokenizer decodes a sequence and not a token: a space may belong to
the token before it, and a character may consist of several tokens. So the cut before token i stands at the
length of the decoded text of the first i tokens, without the mark that stands for an incomplete character.

Legend: N documents.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.base.text import printable, table
from lptune.data.rows import Rows
from lptune.data.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BAR = 30
"""Length of the longest bar of a histogram, in characters."""


class Marks(NamedTuple):
    """What stands before and after a part of a document, by what the part is."""

    target: tuple[str, str]
    context: tuple[str, str]
    special: tuple[str, str]
    """Around a special token, within the other two."""
    legend: str
    """A line that explains them."""


COLOURS = Marks(
    target=("\x1b[32m", "\x1b[0m"),
    context=("\x1b[2m", "\x1b[0m"),
    special=("\x1b[4m", "\x1b[24m"),
    legend="green: targets, which the loss counts; dim: context; underlined: special tokens; ⏎ a line ends",
)
BRACKETS = Marks(
    target=("⟦", "⟧"),
    context=("", ""),
    special=("", ""),
    legend="⟦targets⟧, which the loss counts; the rest is context; ⏎ a line ends",
)


def row_lines(rows: Rows, row: int, tokenizer: Tokenizer, marks: Marks, ids: bool) -> Iterator[str]:
    """The lines that show a packed row: its size, then each of its documents by `document_lines`."""
    numbers = rows.packing.row(row)
    num_tokens = int(rows.documents.lengths[numbers].sum())
    yield (
        f"=== row {row} of {rows.num_rows:,}: {len(numbers):,} documents, {num_tokens:,} tokens, "
        f"{rows.seq_len - num_tokens:,} of padding"
    )
    for number in numbers.tolist():
        yield from document_lines(rows, number, tokenizer, marks, ids)


def document_lines(rows: Rows, number: int, tokenizer: Tokenizer, marks: Marks, ids: bool) -> Iterator[str]:
    """The lines that show a document: its size, then its text with `marks`, in which control characters are
    escaped and a line ends with ⏎. ids: in place of the text, a line for each token with its position, its
    id, whether it is a target, and its piece of the vocabulary.
    """
    documents = rows.documents
    start, stop = documents.place(number)
    tokens, is_target = documents.tokens_T[start:stop].tolist(), documents.is_target_T[start:stop].tolist()
    is_target[0] = False  # of the part of a text, it is a target in the part before
    num_targets = int(documents.num_targets_N[number])
    label = "" if documents.is_desirable_N[number] else ", undesirable"
    yield f"--- document {number}: {len(tokens):,} tokens, {num_targets:,} targets{label}"
    if not ids:
        yield "".join(_marked(tokens, is_target, tokenizer, marks))
        return
    for position, (token, learned) in enumerate(zip(tokens, is_target, strict=True)):
        piece = tokenizer.backend.id_to_token(token)
        yield f"{position:>6}  {token:>7}  {'target' if learned else '      '}  {piece!r}"


def _marked(tokens: list[int], is_target: list[bool], tokenizer: Tokenizer, marks: Marks) -> Iterator[str]:
    """The parts of a document's text, with `marks` around them."""
    added = tokenizer.backend.get_added_tokens_decoder()
    text, place, cut = tokenizer.decode(tokens, skip_special=False), 0, 0
    for learned, part in itertools.groupby(zip(tokens, is_target, strict=True), lambda each: each[1]):
        opening, closing = marks.target if learned else marks.context
        yield opening
        for is_special, group in itertools.groupby(part, lambda each: each[0] in added):
            place, before = place + len(list(group)), cut
            decoded = tokenizer.decode(tokens[:place], skip_special=False).rstrip(_INCOMPLETE)
            cut = len(text) if place == len(tokens) else max(before, len(decoded))
            shown = printable(text[before:cut]).replace("\n", "⏎\n")
            yield f"{marks.special[0]}{shown}{marks.special[1]}" if is_special else shown
        yield closing


def histogram(lengths_N: npt.NDArray[np.int64]) -> list[str]:
    """Lines of a table: documents and their tokens by length. lengths_N: in tokens, at least one document."""
    shortest, longest = int(lengths_N.min()), int(lengths_N.max())
    starts = _bins(shortest, longest)
    bin_N = np.searchsorted(starts, lengths_N, side="right") - 1
    counts = np.bincount(bin_N, minlength=len(starts)).tolist()
    tokens = np.bincount(bin_N, weights=lengths_N, minlength=len(starts)).tolist()
    rows, bars = [("tokens", "documents", "", "share of tokens")], [""]
    for first, stop, count, num_tokens in zip(
        starts, [*starts[1:], longest + 1], counts, tokens, strict=True
    ):
        label = f"{first:,}-{stop - 1:,}" if first < stop - 1 else f"{first:,}"
        share = num_tokens / lengths_N.sum()
        rows.append((label, f"{count:,}", f"{count / len(lengths_N):.1%}", f"{share:.1%}"))
        bars.append("#" * round(_BAR * share))
    return [f"{line}  {bar}".rstrip() for line, bar in zip(table(rows, ">", indent=2), bars, strict=True)]


def _bins(shortest: int, longest: int) -> list[int]:
    """The first length of each bin: powers of two, or about ten equal bins if the lengths are close."""
    if longest >= 8 * shortest:
        return [2**exponent for exponent in range(shortest.bit_length() - 1, longest.bit_length())]
    return list(range(shortest, longest + 1, -(-(longest - shortest + 1) // 10)))
