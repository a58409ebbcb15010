"""Documents as text: each character is shown once, and targets are marked as the loss counts them."""

import re
from pathlib import Path

import numpy as np
import pytest

from lptune.base.text import printable
from lptune.config import DataConfig
from lptune.data import Rows, Tokenizer, prepare, shown
from tests.helpers.documents import Load, Write


def _rows(source: str, tokenizer: Tokenizer, seq_len: int) -> Rows:
    cfg = DataConfig(source=source, cache="none", seq_len=seq_len)
    return prepare(cfg, tokenizer, seed=0, vocab_size=tokenizer.vocab_size).train


def _text(rows: Rows, number: int, tokenizer: Tokenizer, marks: shown.Marks = shown.BRACKETS) -> str:
    _, *lines = shown.document_lines(rows, number, tokenizer, marks, ids=False)
    return "\n".join(lines)


def _sgr(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_brackets_enclose_exactly_what_the_assistant_writes(chat: Tokenizer, jsonl: Write) -> None:
    messages = [
        {"role": "user", "content": "你好，世界 🎉"},
        {"role": "assistant", "content": "Привет, мир.\nüber 🎉"},
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "four"},
    ]
    rows = _rows(jsonl({"messages": messages}), chat, 512)
    assert _text(rows, 0, chat) == (
        "<|im_start|>user⏎\n你好，世界 🎉<|im_end|>⏎\n"
        "<|im_start|>assistant⏎\n⟦Привет, мир.⏎\nüber 🎉<|im_end|>⟧⏎\n"
        "<|im_start|>user⏎\n2 + 2<|im_end|>⏎\n<|im_start|>assistant⏎\n⟦four<|im_end|>⟧⏎\n"
    )


def test_control_characters_of_the_data_are_escaped(tokenizer: Tokenizer, jsonl: Write) -> None:
    hostile = "a\x1b[2Jb\x07\u202ec\r\x9b31m"
    rows = _rows(jsonl({"prompt": hostile, "response": hostile}), tokenizer, 64)
    for marks in (shown.BRACKETS, shown.COLOURS):
        text = _sgr(_text(rows, 0, tokenizer, marks))
        assert text.replace("\n", "").isprintable()
        assert text.count(r"a\x1b[2Jb\x07\u202ec\r\x9b31m") == 2
    *_, line = shown.document_lines(rows, 0, tokenizer, shown.BRACKETS, ids=True)
    assert line.isprintable()


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_all_text_of_real_tokenizers_is_shown_as_transformers_decodes_it(
    assets: Path, asset_tokenizer: Load, name: str, jsonl: Write
) -> None:
    """Also documents that end within a character, as truncation may leave them."""
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(assets / "tokenizers" / name / "tokenizer.json")
    )
    tokenizer = asset_tokenizer(f"tokenizers/{name}").with_chat_template("none")
    lines = (assets / "data" / "multilingual.txt").read_text().splitlines()[:40]
    records = [{"prompt": line, "response": line[::-1]} for line in lines if line.strip()]
    rows = _rows(jsonl(*records), tokenizer, 48)
    assert rows.num_documents >= 10
    for number in range(rows.num_documents):
        start, stop = rows.documents.place(number)
        ids = rows.documents.tokens_T[start:stop].tolist()
        whole = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert not set("⟦⟧⏎") & set(whole)
        text = _text(rows, number, tokenizer)
        assert re.sub("[⟦⟧⏎]", "", text) == printable(whole)


def test_the_lines_of_tokens_have_every_id_and_target_of_the_batch(
    tokenizer: Tokenizer, jsonl: Write
) -> None:
    records = [{"prompt": f"Compute {n}", "response": "two plus two" * n} for n in range(1, 6)]
    rows = _rows(jsonl(*records), tokenizer, 64)
    for row in range(rows.num_rows):
        header, *lines = shown.row_lines(rows, row, tokenizer, shown.BRACKETS, ids=True)
        fields = [line.split() for line in lines if not line.startswith("---")]
        batch = rows.batch([row])
        ids = [int(field[1]) for field in fields]
        assert batch.tokens_BS[0, : len(ids)].tolist() == ids
        # A label stands one place before its target.
        targets = [int(field[1]) for field in fields if field[2] == "target"]
        assert batch.labels_BS[batch.labels_BS != -100].tolist() == targets
        assert f"{len(ids)} tokens, {64 - len(ids)} of padding" in header


def test_the_histogram_counts_each_document_and_token_once() -> None:
    lengths_N = np.array([1, 2, 3, 4, 7, 8, 16, 16, 20, 23], dtype=np.int64)
    header, *bins = shown.histogram(lengths_N)
    assert header.split() == ["tokens", "documents", "share", "of", "tokens"]
    cells = [line.split() for line in bins]
    assert [(label, int(count), share) for label, count, share, *_ in cells] == [
        ("1", 1, "10.0%"), ("2-3", 2, "20.0%"), ("4-7", 2, "20.0%"), ("8-15", 1, "10.0%"),
        ("16-23", 4, "40.0%"),
    ]  # fmt: skip
    assert [each[3] for each in cells] == ["1.0%", "5.0%", "11.0%", "8.0%", "75.0%"]
    assert [len(each[4]) if len(each) > 4 else 0 for each in cells] == [0, 2, 3, 2, 22]


def test_close_lengths_get_equal_bins() -> None:
    assert [line.split()[:2] for line in shown.histogram(np.arange(100, 130))[1:]] == [
        [f"{first}-{first + 2}", "3"] for first in range(100, 130, 3)
    ]
    assert [line.split()[:2] for line in shown.histogram(np.full(7, 64))[1:]] == [["64", "7"]]
