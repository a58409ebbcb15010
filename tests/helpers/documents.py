"""Documents of prepared rows, as text with special tokens shown; the types of fixtures of tests/data."""

from collections.abc import Callable
from pathlib import Path

from lptune.data import Rows, Tokenizer

Make = Callable[..., Path]
"""`tokenizer_folder(name, **config)`."""
Write = Callable[..., str]
"""`jsonl(row, …, name=…)`."""
Load = Callable[[str], Tokenizer]
"""`asset_tokenizer(name)`."""


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
