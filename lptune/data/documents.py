"""Documents as flat arrays: all tokens end to end, a flag per token for "is a target", and the start of
each document.

After tokenization (tokenization.py) there is no Python object per token or document: a billion tokens take
5 GB. The documents of several sources are joined without copying their tokens, which may be mapped files: a
mixture only adds arrays with one entry for each document and each copy of a document, about 40 bytes for a
document and 48 for a copy, on every rank.

Legend: T tokens, N documents, N1 = N + 1.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Joined:
    """Several arrays, read like one array. A slice must lie within one of them."""

    def __init__(self, arrays: "Sequence[npt.NDArray[Any] | Joined]") -> None:
        self.dtype: np.dtype[Any] = arrays[0].dtype
        self._arrays = list(arrays)
        self._bounds = np.cumsum([0, *(len(array) for array in arrays)]).tolist()

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, places: slice | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A view for a slice; a copy for an array of `places`, which must not be negative."""
        if isinstance(places, slice):
            number = self._index(places.start)
            base = self._bounds[number]
            assert places.start <= places.stop <= self._bounds[number + 1]
            return self._arrays[number][places.start - base : places.stop - base]
        found = np.empty(len(places), dtype=self.dtype)
        for number in range(self._index(int(places.min())), self._index(int(places.max())) + 1):
            first, stop = self._bounds[number], self._bounds[number + 1]
            here = (places >= first) & (places < stop)
            found[here] = self._arrays[number][places[here] - first]
        return found

    @property
    def num_arrays(self) -> int:
        """Number of arrays that are joined."""
        return len(self._arrays)

    def array_of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each of `places`, the number of the array that holds it. No array is empty."""
        numbers: npt.NDArray[np.int64] = np.searchsorted(self._bounds, places, side="right") - 1
        return numbers

    def _index(self, place: int) -> int:
        """Number of the array that holds `place`; for the end, of the last one."""
        return min(bisect_right(self._bounds, place), len(self._arrays)) - 1


PIECE_TOKENS = 1024 * 1024
DTYPES = {
    "tokens_T": "<i4",
    "is_target_T": "|b1",
    "offsets_N1": "<i8",
    "answers_N2": "<i4",
    "prompt_keys_N": "<u8",
    "num_targets_N": "<i8",
    "is_desirable_N": "|b1",
}
"""The arrays of `Documents` that stand end to end, as bytes: in the cache, and between processes."""

_UNKNOWN: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_UNLABELLED: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)


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
    is_desirable_N: npt.NDArray[np.bool_] = dataclasses.field(default_factory=lambda: _UNLABELLED)
    """The label of each document's answer; all True if the rows have no labels."""

    def __post_init__(self) -> None:
        if self.starts_N is _UNKNOWN:
            object.__setattr__(self, "starts_N", self.offsets_N1[:-1])
        if self.num_targets_N is _UNKNOWN:
            counts = np.zeros(0, dtype=np.int64)
            if len(self.starts_N):
                assert isinstance(self.is_target_T, np.ndarray)  # with several sources the counts are given
                counts = np.add.reduceat(self.is_target_T, self.starts_N, dtype=np.int64)
            object.__setattr__(self, "num_targets_N", counts)
        if self.is_desirable_N is _UNLABELLED:
            object.__setattr__(self, "is_desirable_N", np.ones(self.num_documents, dtype=np.bool_))

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
            num_targets_N=self.num_targets_N[numbers], is_desirable_N=self.is_desirable_N[numbers],
        )  # fmt: skip

    def cut(
        self,
        numbers_P: npt.NDArray[np.int64],
        starts_P: npt.NDArray[np.int64],
        lengths_P: npt.NDArray[np.int64],
    ) -> "Documents":
        """Parts of the documents `numbers_P`, in that order: `lengths_P` tokens from `starts_P` on. Only raw
        text may be cut, where every token but the first is a target. Tokens and targets are not copied: the
        first token of a part, a target of the part before, is none here, since no token precedes it.
        """
        found, is_part_P = self.select(numbers_P), lengths_P < self.lengths[numbers_P]
        answers_P2 = np.where(
            is_part_P[:, None], np.stack([np.ones_like(lengths_P), lengths_P], 1), found.answers_N2
        )
        return dataclasses.replace(
            found, offsets_N1=offsets_of(lengths_P), starts_N=found.starts_N + starts_P,
            answers_N2=answers_P2.astype(np.int32),
            num_targets_N=np.where(is_part_P, lengths_P - 1, found.num_targets_N),
        )  # fmt: skip

    @property
    def goes_on(self) -> npt.NDArray[np.bool_]:
        """(N,): whether the next document is the next part of the same text (`cut`)."""
        ends_N = self.starts_N + self.lengths
        return np.append(self.starts_N[1:] == ends_N[:-1] - 1, np.zeros(1, dtype=np.bool_))

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
    """The documents of all parts (at least one), in order. parts: as their sources made them, neither
    selected nor cut, so that documents stand end to end.
    """
    tokens_T, is_target_T = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens_T", "is_target_T")
    )
    return Documents(tokens_T=tokens_T, is_target_T=is_target_T, **_of_documents(parts))


def joined(sources: Sequence[Documents]) -> Documents:
    """The documents of all sources, in order, without copying their tokens."""
    if len(sources) == 1:
        return sources[0]
    return Documents(
        tokens_T=Joined([source.tokens_T for source in sources]),
        is_target_T=Joined([source.is_target_T for source in sources]),
        **_of_documents(sources),
    )


def _of_documents(parts: Sequence[Documents]) -> dict[str, npt.NDArray[Any]]:
    """The arrays with an entry for each document of all parts."""
    names = ("answers_N2", "prompt_keys_N", "num_targets_N", "is_desirable_N")
    found = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return found | {"offsets_N1": offsets_of(np.concatenate([part.lengths for part in parts]))}


def num_sources(documents: Documents) -> int:
    """Number of sources that `documents` come from: documents of `joined`, or a selection of them."""
    return documents.tokens_T.num_arrays if isinstance(documents.tokens_T, Joined) else 1


def sources_of(documents: Documents, numbers_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each of the documents `numbers_N`, the number of its source in `joined`."""
    if isinstance(documents.tokens_T, Joined):
        return documents.tokens_T.array_of(documents.starts_N[numbers_N])
    return np.zeros(len(numbers_N), dtype=np.int64)
