"""The rows that a rank gets in a step: arithmetic on one number, the global sample index. There is no state
to save.

Step k takes samples k*G … (k+1)*G - 1 of an endless stream of epochs (G: global batch size). These are cut
into micro-batches in order, and rank r takes the r-th group of consecutive micro-batches. So the content of
every micro-batch, and every scale that is computed over it, does not depend on the number of ranks.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lptune.config import RunConfig, check_batches
from lptune.data.rows import EMPTY_ROW, Batch, Rows


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
        """Preferences of step `step` over all ranks, like `num_targets`."""
        return int(self.rows.num_preferences_per_row[self._rows_of(step)].sum())

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
