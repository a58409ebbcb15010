"""Mismatched documents: each prompt with the answer to another one, for the estimate z of KTO.

KTO compares the reward of an answer with that of an unrelated answer to the same prompt
(lptune/training/kto.py). Such answers are those of other rows of the data. Which prompt gets which answer is
decided once, by the packed rows alone: the log-probabilities before training can then be computed and stored,
and nothing depends on the number of ranks, on the micro-batch size or on the step.

Within a packed row, answers rotate among the documents. So the mismatched documents have the same prompts and
the same answers as the row, as in the paper; together they have as many tokens, and fit into the row
without being cut. Documents are sorted by their prompts before the rotation, whose distance is the size of
the largest group of equal prompts (half of the documents at most). So no prompt gets an answer of its own,
unless more than half of the documents that rotate have one and the same prompt.

Documents that are alone in their rows rotate among each other (a single one takes the first answer to another
prompt), and are cut where their rows end: a part of an answer is enough for this estimate. Where
`data.packing` is false, these are all documents, and the answers of a step are then those of other steps.

Legend: N documents, T tokens of all documents.
"""

import numpy as np
import numpy.typing as npt

from lptune.data.documents import Documents, offsets_of
from lptune.data.packing import Int64Array, Packing


def mismatched(documents: Documents, packing: Packing, seq_len: int) -> Documents:
    """Document i is the prompt of document i of `documents` with the answer of another one: all tokens before
    its first target, then those from the first target of the other on. It has at most `seq_len` tokens.
    """
    from_N = _answers_from(packing, documents.prompt_keys_N)
    first_N = documents.answers_N2[:, 0].astype(np.int64)
    answer_N = np.minimum((documents.lengths - first_N)[from_N], seq_len - first_N)
    # Prompts and answers, in turn, as documents: end_to_end reads them in pieces, also of several sources.
    # Only tokens are read from `parts`; its other fields are not used.
    lengths_N2 = np.stack([first_N, answer_N], 1)
    parts = Documents(
        tokens_T=documents.tokens_T,
        is_target_T=documents.is_target_T,
        offsets_N1=offsets_of(lengths_N2.reshape(-1)),
        starts_N=np.stack([documents.starts_N, (documents.starts_N + first_N)[from_N]], 1).reshape(-1),
        answers_N2=np.zeros((0, 2), dtype=np.int32),
        prompt_keys_N=np.zeros(0, dtype=np.uint64),
        num_targets_N=np.zeros(0, dtype=np.int64),
    )
    return Documents(
        tokens_T=np.concatenate(list(parts.end_to_end(documents.tokens_T))),
        is_target_T=np.concatenate(list(parts.end_to_end(documents.is_target_T))),
        offsets_N1=offsets_of(lengths_N2.sum(1)),
        answers_N2=np.stack([first_N, first_N + answer_N], 1).astype(np.int32),
        prompt_keys_N=documents.prompt_keys_N,
    )


def _answers_from(packing: Packing, keys_N: npt.NDArray[np.uint64]) -> Int64Array:
    """(N,) for each document, the number of the document whose answer it gets."""
    from_N = np.empty(len(keys_N), dtype=np.int64)
    sizes = np.diff(packing.row_offsets)
    for row in np.flatnonzero(sizes > 1).tolist():
        _rotate(from_N, packing.row(row), keys_N)
    alone = packing.documents[packing.row_offsets[:-1][sizes == 1]]
    if len(alone) == 1:
        others = np.flatnonzero(keys_N != keys_N[alone[0]])
        from_N[alone] = others[0] if len(others) else alone[0]
    elif len(alone):
        _rotate(from_N, alone, keys_N)
    return from_N


def _rotate(from_N: Int64Array, numbers: Int64Array, keys_N: npt.NDArray[np.uint64]) -> None:
    """Fills in from_N[numbers]: each of the documents `numbers`, two or more, gets the answer of another."""
    numbers = numbers[np.argsort(keys_N[numbers], kind="stable")]
    _, counts = np.unique(keys_N[numbers], return_counts=True)
    from_N[numbers] = np.roll(numbers, -min(int(counts.max()), len(numbers) // 2))
