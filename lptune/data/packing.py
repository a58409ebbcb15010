"""Packing: decides which documents share a row, by best-fit decreasing.

Documents are taken from long to short; each goes to the row where the least space is left over. The result
has at most 11/9 of the fewest rows possible; in practice short documents fill the gaps and rows are nearly
full. Placing documents one by one would cost a search for each. But documents of equal length are
interchangeable, and so are rows with equal space, so whole groups are placed at once. The work then depends
on the number of different lengths, not of documents: a million documents take well under a second.

Texts of a little more than half a row leave the rest of each row empty. Raw text may be cut (`cut_to_fill`):
the texts of rows that are not nearly full stand end to end instead, and are cut where a row ends. A part
begins with the last token of the part before, so each token is still predicted once, with the tokens of its
own part before it. Rows that best fit has filled stay as they are: a cut costs context.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.data.order import random_keys

Int64Array = npt.NDArray[np.int64]


class Packing(NamedTuple):
    """Documents by row, one row after the other; row r begins at `row_offsets[r]`."""

    documents: Int64Array
    row_offsets: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, number: int) -> Int64Array:
        """The documents of a row, in order."""
        return self.documents[self.row_offsets[number] : self.row_offsets[number + 1]]


def pack(lengths: npt.ArrayLike, capacity: int, seed: int) -> Packing:
    """Rows of at most `capacity` tokens. Each document is in one row, uncut.

    A function of (lengths, capacity, seed). The seed decides which documents of equal length share rows. All
    `lengths` are in 1..capacity.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    assert lengths_N.size
    assert lengths_N.min() >= 1
    assert lengths_N.max() <= capacity
    order_N = np.lexsort((random_keys(seed, "packing", len(lengths_N)), -lengths_N))
    sorted_N = lengths_N[order_N]
    starts = np.flatnonzero(np.r_[True, sorted_N[1:] != sorted_N[:-1]])
    stops = np.r_[starts[1:], len(sorted_N)]

    row_of_N = np.empty(len(lengths_N), dtype=np.int64)
    space = _OpenRows(capacity)
    num_rows = 0
    for start, stop, length in zip(starts.tolist(), stops.tolist(), sorted_N[starts].tolist(), strict=True):
        while start < stop:
            left = space.smallest(length)
            if left is None:  # no open row has space: open as many as the rest of this group needs
                left = capacity
                count = -(-(stop - start) // (capacity // length))
                rows = np.arange(num_rows, num_rows + count, dtype=np.int64)
                num_rows += count
            else:
                rows = space.take(left)
            per_row = (
                left // length
            )  # the row just filled has the least space left, so it is the best fit again
            needed = min(len(rows), -(-(stop - start) // per_row))
            space.put(left, rows[needed:])
            placed = min(needed * per_row, stop - start)
            row_of_N[start : start + placed] = np.repeat(rows[:needed], per_row)[:placed]
            start += placed
            in_last = placed - (needed - 1) * per_row
            space.put(left - per_row * length, rows[: needed - 1])
            space.put(left - in_last * length, rows[needed - 1 : needed])

    by_row_N = np.argsort(row_of_N, kind="stable")
    counts = np.bincount(row_of_N, minlength=num_rows)
    return Packing(order_N[by_row_N], np.r_[0, np.cumsum(counts)].astype(np.int64))


def pack_groups(lengths: npt.ArrayLike, size: int, capacity: int, seed: int) -> Packing:
    """`pack` for documents that stay together in groups of `size`: each group is in one row, in its order.

    lengths: (N,), document i belongs to group i // size. The sum of a group is in 1..capacity.
    """
    lengths_G = np.asarray(lengths, dtype=np.int64).reshape(-1, size).sum(1)
    return _of_groups(pack(lengths_G, capacity, seed), size)


def one_group_per_row(num_groups: int, size: int) -> Packing:
    """No packing: row i holds the `size` documents of group i."""
    return _of_groups(one_document_per_row(num_groups), size)


def _of_groups(packing: Packing, size: int) -> Packing:
    documents = packing.documents[:, None] * size + np.arange(size)
    return Packing(documents.reshape(-1), packing.row_offsets * size)


def one_document_per_row(num_documents: int) -> Packing:
    """No packing: row i holds document i."""
    return Packing(np.arange(num_documents, dtype=np.int64), np.arange(num_documents + 1, dtype=np.int64))


NEARLY_FULL = 0.95
"""Rows with this share of tokens are left to best fit."""


class Parts(NamedTuple):
    """Parts of documents, in the order of the documents: whole ones, and texts in several parts."""

    numbers: Int64Array
    """The document of each part."""
    starts: Int64Array
    """Where it begins in the document; after a cut, with the last token before the cut."""
    lengths: Int64Array


def cut_to_fill(
    lengths: npt.ArrayLike, is_text: npt.NDArray[np.bool_], packing: Packing, capacity: int
) -> tuple[Parts, Packing] | None:
    """Parts of at least two tokens, and their rows, which are fewer than in `packing`; None if cutting texts
    saves no row. Rows in `packing` that are nearly full, or hold a document that is no text, stay.
    """
    lengths_N, (documents, row_offsets) = np.asarray(lengths, dtype=np.int64), packing
    tokens_R = np.add.reduceat(lengths_N[documents], row_offsets[:-1])
    is_loose_R = np.logical_and.reduceat(is_text[documents], row_offsets[:-1])
    is_loose_R &= tokens_R < NEARLY_FULL * capacity
    is_loose_M = np.repeat(is_loose_R, np.diff(row_offsets))
    loose = documents[is_loose_M]
    bounds = np.r_[0, np.cumsum(lengths_N[loose])]
    starts: list[int] = []
    start, end = 0, int(bounds[-1])
    while start < end:
        starts.append(start)
        start += capacity
        if start < end and bounds[bisect_left(bounds, start)] != start:
            start -= 1  # within a text
    if len(starts) >= is_loose_R.sum():
        return None
    starts_R = np.array(starts, dtype=np.int64)
    stops_R = np.minimum(starts_R + capacity, end)
    first_R = np.searchsorted(bounds, starts_R, side="right") - 1
    count_R = np.searchsorted(bounds, stops_R, side="left") - first_R
    row_P = np.repeat(np.arange(len(starts_R)), count_R)
    text_P = first_R[row_P] + np.arange(len(row_P)) - np.repeat(np.cumsum(count_R) - count_R, count_R)
    start_P = np.maximum(bounds[text_P], starts_R[row_P])
    length_P = np.minimum(bounds[text_P + 1], stops_R[row_P]) - start_P
    kept_P = length_P > 1  # the first token of a text alone: its text stands whole in the next row
    row_P, text_P, start_P, length_P = row_P[kept_P], text_P[kept_P], start_P[kept_P], length_P[kept_P]

    whole = documents[~is_loose_M]
    kept_row_M = np.repeat(np.cumsum(~is_loose_R) - 1, np.diff(row_offsets))[~is_loose_M]
    row_P = np.r_[kept_row_M, row_P + np.count_nonzero(~is_loose_R)]
    numbers_P = np.r_[whole, loose[text_P]]
    start_P = np.r_[np.zeros_like(whole), start_P - bounds[text_P]]
    length_P = np.r_[lengths_N[whole], length_P]
    order_P = np.lexsort((start_P, numbers_P))
    place_P = np.empty_like(order_P)
    place_P[order_P] = np.arange(len(order_P))
    by_row = np.argsort(row_P, kind="stable")
    offsets = np.r_[0, np.cumsum(np.bincount(row_P))].astype(np.int64)
    return Parts(numbers_P[order_P], start_P[order_P], length_P[order_P]), Packing(place_P[by_row], offsets)


class _OpenRows:
    """Open rows, by the space left in them; a bit set tells which sizes exist."""

    def __init__(self, capacity: int) -> None:
        self._rows: list[list[Int64Array]] = [[] for _ in range(capacity + 1)]
        self._bits = 0

    def put(self, left: int, rows: Int64Array) -> None:
        if len(rows) and left:
            self._rows[left].append(rows)
            self._bits |= 1 << left

    def smallest(self, length: int) -> int | None:
        """The smallest space among open rows that holds `length` tokens; None if there is none."""
        fitting = self._bits >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def take(self, left: int) -> Int64Array:
        rows, self._rows[left] = self._rows[left], []
        self._bits &= ~(1 << left)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)
