"""Packed rows of fixed length, batches of them, and the rows that a rank gets in a step.

A row holds whole documents one after the other. The padding at its end is a document of its own without
targets, so every token of a row belongs to exactly one document. The two documents of a preference, with the
numbers 2i (chosen) and 2i + 1 among all documents, stand next to each other in one row. Labels are shifted
here, once: `labels[s]` is the token to predict at s, which is tokens[s + 1] if that belongs to the same
document and is a target, and -100 otherwise.

The stream of rows is arithmetic on one number, the global sample index; there is no state to save. Step k
takes samples k*G … (k+1)*G - 1 of an endless stream of epochs (G: global batch size). These are cut into
micro-batches in order, and rank r takes the r-th group of consecutive micro-batches. So the content of every
micro-batch, and every scale that is computed over it, does not depend on the number of ranks.

Legend: B rows of a batch, S tokens of a row, D documents of a batch.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.config import RunConfig, check_batches
from lptune.data.documents import Documents, num_sources, sources_of
from lptune.data.mismatched import mismatched
from lptune.data.order import permutation
from lptune.data.packing import Packing

if TYPE_CHECKING:  # `lptune data` shows rows without a batch, and torch takes seconds to import
    import torch

IGNORE = -100
EMPTY_ROW = -1
"""Row number that stands for a row of padding."""


class Batch(NamedTuple):
    """Packed rows as tensors, with labels and the bounds of documents."""

    tokens_BS: "torch.Tensor"
    """int64."""
    labels_BS: "torch.Tensor"
    """int64, already shifted; -100 where there is no target."""
    positions_BS: "torch.Tensor"
    """int64; starts with 0 at the first token of each document."""
    document_BS: "torch.Tensor"
    """int64; number of the document within its row: 0, 1, 2 …"""
    offsets: "torch.Tensor"
    """int32 (`Rows.most_documents(B)` + 1,): starts of the documents in the flattened tokens; the unused end
    is filled with B * S.
    """
    num_targets: int
    """Number of labels that are not -100."""
    one_document_per_row: bool
    """Whether no row of the data has more than one document. Plain causal attention is then enough: the
    padding sees the document, but has no targets.
    """
    source_BS: "torch.Tensor"
    """int64, always on the CPU: the number of the source of each token's document. Padding has 0."""
    numbers_D: "torch.Tensor"
    """int64 (len(offsets) - 1,), always on the CPU: the number of each document of `offsets` among all
    documents of the data. -1 for padding and for the unused end.
    """

    @property
    def is_padding(self) -> "torch.Tensor":
        """bool (B, S), on the CPU: whether a token belongs to no document of the data."""
        import torch

        sizes_D = self.offsets.cpu().diff()
        return torch.repeat_interleave(self.numbers_D < 0, sizes_D).view(self.tokens_BS.shape)

    def to(self, device: "torch.device | str") -> "Batch":
        """The same batch on `device`."""
        # A copy to a GPU from memory that is not pinned waits for all that the GPU was given before.
        here: list[torch.Tensor] = list(self[:5])
        if str(device).startswith("cuda") and here[0].device.type == "cpu":
            here = [tensor.pin_memory() for tensor in here]
        return Batch._make([*(tensor.to(device, non_blocking=True) for tensor in here), *self[5:]])


class Rows:
    """Tokenized documents, packed into rows; immutable."""

    def __init__(self, documents: Documents, packing: Packing, *, seq_len: int, pad_id: int) -> None:
        self.documents = documents
        self.packing = packing
        self.seq_len = seq_len
        self.pad_id = pad_id

    @property
    def num_rows(self) -> int:
        return self.packing.num_rows

    @property
    def num_documents(self) -> int:
        return self.documents.num_documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.documents.offsets_N1[-1])

    @cached_property
    def num_target_tokens(self) -> int:
        """Number of labels over all rows that are not -100."""
        return int(self.documents.num_targets_N.sum())

    @cached_property
    def num_targets_per_row(self) -> npt.NDArray[np.int64]:
        """Number of labels of each row that are not -100."""
        in_document = self.documents.num_targets_N[self.packing.documents]
        in_row: npt.NDArray[np.int64] = np.add.reduceat(in_document, self.packing.row_offsets[:-1])
        return in_row

    @cached_property
    def mismatched(self) -> "Rows":
        """The same rows with other answers, for KTO (mismatched.py): row i has the prompts of row i. Computed
        once; takes 5 bytes of memory for each token.
        """
        made = mismatched(self.documents, self.packing, self.seq_len)
        return Rows(made, self.packing, seq_len=self.seq_len, pad_id=self.pad_id)

    @cached_property
    def num_documents_per_row(self) -> npt.NDArray[np.int64]:
        """Number of documents of each row, without its padding."""
        counts: npt.NDArray[np.int64] = np.diff(self.packing.row_offsets)
        return counts

    @property
    def num_preferences(self) -> int:
        """Number of preferences of all rows. For rows of preferences only."""
        return self.num_documents // 2

    @property
    def num_sources(self) -> int:
        """Number of data sources, also of those without a document here."""
        return num_sources(self.documents)

    def in_turns(self, numbers: Sequence[int]) -> Sequence[int]:
        """These documents, with those of each source in turns."""
        if self.num_sources == 1:
            return numbers
        before: Counter[int] = Counter()
        places = []
        for source in sources_of(self.documents, np.asarray(numbers, dtype=np.int64)).tolist():
            places.append(before[source])
            before[source] += 1
        return [number for _, number in sorted(zip(places, numbers, strict=True), key=lambda each: each[0])]

    def num_targets_by_source(self, row_numbers: Sequence[int]) -> list[int]:
        """Number of labels that are not -100 in the rows `row_numbers`, for each source."""
        numbers = np.concatenate([self.packing.row(row) for row in row_numbers])
        counts = np.zeros(self.num_sources, dtype=np.int64)
        np.add.at(counts, sources_of(self.documents, numbers), self.documents.num_targets_N[numbers])
        found: list[int] = counts.tolist()
        return found

    @property
    def fill(self) -> float:
        """Share of the tokens of all rows that is not padding."""
        return self.num_tokens / (self.num_rows * self.seq_len)

    @cached_property
    def _documents_per_row(self) -> npt.NDArray[np.int64]:
        """Number of documents of each row, with its padding as one; the largest first."""
        lengths = self.documents.lengths[self.packing.documents]
        tokens_in_row = np.add.reduceat(lengths, self.packing.row_offsets[:-1])
        return np.sort(self.num_documents_per_row + (tokens_in_row < self.seq_len))[::-1]

    def most_documents(self, num_rows: int) -> int:
        """The largest number of documents that a batch of `num_rows` rows can have, with padding.

        The sum over the rows with most documents, not `num_rows` times the largest: the backward of flash
        attention takes memory for each, in every batch, and a row of a thousand tiny documents is rare. A row
        may be twice in a batch: at the end of one epoch and at the beginning of the next.
        """
        times = 1 + -(-(num_rows - 1) // self.num_rows)
        return int(np.repeat(self._documents_per_row, times)[:num_rows].sum())

    @cached_property
    def one_document_per_row(self) -> bool:
        """Whether no row has more than one document, without the padding. It holds for all rows, so that all
        batches of a run take the same path.
        """
        return bool((self.num_documents_per_row == 1).all())

    def document_lengths(self, row_numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Number of tokens of each document, as attention sees it, in the rows `row_numbers`. Padding counts
        as a document; with one document per row, the document is the whole row.
        """
        if self.one_document_per_row:
            return np.full(len(row_numbers), self.seq_len, dtype=np.int64)
        lengths = self.documents.lengths
        rows = [lengths[self.packing.row(row)] for row in row_numbers]
        padding = [self.seq_len - int(row.sum()) for row in rows]
        return np.concatenate([*rows, np.array([left for left in padding if left], dtype=np.int64)])

    @cached_property
    def digest(self) -> str:
        """sha256 of tokens, targets, labels, documents and packing. Equal digests mean equal batches."""
        sha = hashlib.sha256(f"{self.seq_len} {self.pad_id}".encode())
        documents, packing = self.documents, self.packing
        for array_T in (documents.tokens_T, documents.is_target_T):
            sha.update(f" {array_T.dtype.str} {self.num_tokens} ".encode())
            for piece in documents.end_to_end(array_T):
                sha.update(np.ascontiguousarray(piece).data)
        for array in (documents.offsets_N1, packing.documents, packing.row_offsets):
            sha.update(f" {array.dtype.str} {len(array)} ".encode())
            sha.update(np.ascontiguousarray(array).data)
        if not documents.is_desirable_N.all():  # so rows without labels have the digest that they always had
            sha.update(b" labels " + documents.is_desirable_N.tobytes())
        return sha.hexdigest()

    def row_at(self, sample_index: int, seed: int) -> int:
        """The row number of a global sample index. Each epoch is a permutation of the rows, a function of
        (seed, epoch).
        """
        epoch, place = divmod(sample_index, self.num_rows)
        return int(permutation(seed, epoch, self.num_rows)[place])

    def prompt_and_answer(self, document: int) -> tuple[list[int], list[int]]:
        """The tokens of a document before its first answer, and that answer (for raw text: its beginning, and
        the rest).
        """
        base, stop = self.documents.place(document)
        first, end = self.documents.answers_N2[document].tolist()
        tokens = self.documents.tokens_T[base:stop].tolist()
        return tokens[:first], tokens[first:end]

    def batch(self, row_numbers: Sequence[int]) -> Batch:
        """The rows `row_numbers` as tensors. EMPTY_ROW stands for a row of padding."""
        shape = (len(row_numbers), self.seq_len)
        tokens_BS = np.full(shape, self.pad_id, dtype=np.int64)
        labels_BS = np.full(shape, IGNORE, dtype=np.int64)
        positions_BS = np.empty(shape, dtype=np.int64)
        document_BS = np.empty(shape, dtype=np.int64)
        source_BS = np.zeros(shape, dtype=np.int64)
        num_rows = len(row_numbers)
        offsets = np.full(self.most_documents(num_rows) + 1, num_rows * self.seq_len, dtype=np.int32)
        numbers_D = np.full(len(offsets) - 1, -1, dtype=np.int64)
        num_offsets = 0
        documents, packing = self.documents, self.packing
        for b, row in enumerate(row_numbers):
            numbers = packing.documents[0:0] if row == EMPTY_ROW else packing.row(row)
            sources = sources_of(documents, numbers)
            start = 0
            for i, number in enumerate(numbers.tolist()):
                base, base_stop = documents.place(number)
                stop = start + base_stop - base
                tokens = documents.tokens_T[base:base_stop]
                tokens_BS[b, start:stop] = tokens
                is_target = documents.is_target_T[base + 1 : base_stop]
                labels_BS[b, start : stop - 1] = np.where(is_target, tokens[1:], IGNORE)
                positions_BS[b, start:stop] = np.arange(stop - start)
                document_BS[b, start:stop] = i
                source_BS[b, start:stop] = sources[i]
                offsets[num_offsets] = b * self.seq_len + start
                numbers_D[num_offsets] = number
                num_offsets += 1
                start = stop
            if start < self.seq_len:
                positions_BS[b, start:] = np.arange(self.seq_len - start)
                document_BS[b, start:] = len(numbers)
                offsets[num_offsets] = b * self.seq_len + start
                num_offsets += 1
        import torch

        return Batch(
            tokens_BS=torch.from_numpy(tokens_BS),
            labels_BS=torch.from_numpy(labels_BS),
            positions_BS=torch.from_numpy(positions_BS),
            document_BS=torch.from_numpy(document_BS),
            offsets=torch.from_numpy(offsets),
            num_targets=int(np.count_nonzero(labels_BS != IGNORE)),
            one_document_per_row=self.one_document_per_row,
            source_BS=torch.from_numpy(source_BS),
            numbers_D=torch.from_numpy(numbers_D),
        )


class Loader:
    """The training stream of one rank."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        assert 0 <= rank < num_ranks
        check_batches(global_batch_size, micro_batch_size, num_ranks)
        self.rows = rows
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.micro_batches_per_rank = global_batch_size // micro_batch_size // num_ranks

    @classmethod
    def for_run(cls, rows: Rows, cfg: RunConfig, *, rank: int, num_ranks: int) -> "Loader":
        """The stream of a run, with the seed and the batch sizes of `cfg`."""
        return cls(
            rows,
            seed=cfg.seed,
            global_batch_size=cfg.global_batch_size,
            micro_batch_size=cfg.micro_batch_size,
            rank=rank,
            num_ranks=num_ranks,
        )

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of step `step` (counted from 0), in order."""
        return self._micro_batches(self.rows, step)

    def mismatched(self, step: int) -> list[Batch]:
        """`micro_batches` with the answers of other prompts (`Rows.mismatched`)."""
        return self._micro_batches(self.rows.mismatched, step)

    def _micro_batches(self, rows: Rows, step: int) -> list[Batch]:
        size = self.micro_batch_size
        start = step * self.global_batch_size + self.rank * self.micro_batches_per_rank * size
        return [
            rows.batch([self.rows.row_at(sample, self.seed) for sample in range(first, first + size)])
            for first in range(start, start + self.micro_batches_per_rank * size, size)
        ]

    def num_targets(self, step: int) -> int:
        """Targets of step `step` over all ranks. Each rank counts them itself, since it has all rows."""
        return int(self.rows.num_targets_per_row[self._rows_of(step)].sum())

    def num_targets_by_source(self, step: int) -> list[int]:
        """`num_targets` for each data source."""
        return self.rows.num_targets_by_source(self._rows_of(step))

    def num_documents(self, step: int) -> int:
        """Documents of step `step` over all ranks, like `num_targets`."""
        return int(self.rows.num_documents_per_row[self._rows_of(step)].sum())

    def num_preferences(self, step: int) -> int:
        """Preferences of step `step` over all ranks; each has two documents, in one row."""
        return self.num_documents(step) // 2

    def document_lengths(self, step: int) -> npt.NDArray[np.int64]:
        """`Rows.document_lengths` of step `step`, over all ranks."""
        return self.rows.document_lengths(self._rows_of(step))

    def _rows_of(self, step: int) -> list[int]:
        """Numbers of the rows of step `step`, over all ranks."""
        start = step * self.global_batch_size
        samples = range(start, start + self.global_batch_size)
        return [self.rows.row_at(sample, self.seed) for sample in samples]

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps in which every row is seen once, with a fraction."""
        return self.rows.num_rows / self.global_batch_size

    def num_steps(self, num_epochs: int) -> int:
        """Number of steps after which every row was seen `num_epochs` times."""
        return -(-num_epochs * self.rows.num_rows // self.global_batch_size)


def evaluation_batches(rows: Rows, batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> Iterator[Batch]:
    """All rows once, in order, dealt out to all ranks. Rows of padding fill up the last batches, so that all
    batches have one shape and all ranks have equally many.
    """
    num_batches = -(-rows.num_rows // (batch_size * num_ranks))
    for i in range(num_batches):
        first = (i * num_ranks + rank) * batch_size
        yield rows.batch(
            [row if row < rows.num_rows else EMPTY_ROW for row in range(first, first + batch_size)]
        )
