"""Documents of numbers; those of prepared rows as text with special tokens shown; the types of fixtures of
tests/data.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lptune.data import Rows, Tokenizer
from lptune.data.documents import Documents, offsets_of

Make = Callable[..., Path]
"""`tokenizer_folder(name, **config)`."""
Write = Callable[..., str]
"""`jsonl(row, …, name=…)`."""
Load = Callable[[str], Tokenizer]
"""`asset_tokenizer(name)`."""


def numbered(lengths: Sequence[int], first: int = 0) -> Documents:
    """Documents of the tokens `first`, `first` + 1 …: every third is no target, nor is one that begins a
    document. Each has a prompt of its own.
    """
    tokens_T = np.arange(first, first + sum(lengths), dtype=np.int32)
    offsets_N1 = offsets_of(np.array(lengths, dtype=np.int64))
    is_target_T = tokens_T % 3 != 0
    is_target_T[offsets_N1[:-1]] = False
    return Documents(
        tokens_T=tokens_T, is_target_T=is_target_T, offsets_N1=offsets_N1,
        answers_N2=np.array([[length // 2, length] for length in lengths], dtype=np.int32),
        prompt_keys_N=np.arange(len(lengths), dtype=np.uint64),
    )  # fmt: skip


def texts(rows: Rows, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each document: the whole text, and what is learned of it."""
    found = []
    for i in range(rows.num_documents):
        start, stop = rows.documents.place(i)
        tokens, is_target = rows.documents.tokens_T[start:stop], rows.documents.is_target_T[start:stop]
        whole, learned = (
            tokenizer.decode(part.tolist(), skip_special=False) for part in (tokens, tokens[is_target])
        )
        found.append((whole, learned))
    return found


def learned(rows: Rows, tokenizer: Tokenizer) -> list[str]:
    """What is learned of each document."""
    return [text for _, text in texts(rows, tokenizer)]
