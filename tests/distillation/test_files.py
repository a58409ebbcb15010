"""The files of log-probabilities: they are read back by document, and damage is one line."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lptune.base.errors import UserError
from lptune.distillation.files import (
    Index,
    Reader,
    digest_of,
    entry_of,
    file_name,
    read_index,
    write_file,
    write_index,
)
from lptune.distillation.top_k import TopK

COUNTS = np.array([3, 1, 4, 2, 5], dtype=np.int64)
"""Targets of five documents, of which three are in the first file."""
SPLIT = 3
K = 2
MADE_WITH = {
    "the teacher's weights": "a",
    "the teacher's config.json": "b",
    "tokens": "c",
    "documents": "d",
    "logits.top_k": K,
    "vocab_size": 99,
    "temperatures": [1.0],
}


def rows(num_tokens: int, first: int = 0) -> TopK:
    log_p_Tk = -torch.arange(first, first + num_tokens * K).reshape(num_tokens, K).half()
    return TopK(log_p_Tk, (-log_p_Tk).int(), log_p_Tk[:, :1] - 1)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    bounds, entries, first = ((0, SPLIT), (SPLIT, len(COUNTS))), [], 0
    job = digest_of(MADE_WITH)
    for number, (start, stop) in enumerate(bounds):
        counts = COUNTS[start:stop]
        path = tmp_path / file_name(number, 2)
        write_file(path, rows(int(counts.sum()), first), counts, job)
        first += int(counts.sum()) * K
        entry = entry_of(path, start, stop - start, job)
        assert entry is not None
        entries.append(vars(entry))
    rest = {"num_documents": 5, "num_targets": 15, "started_on": "2026-01-01", "rows": {}}
    write_index(tmp_path, {"made_with": MADE_WITH, "is_complete": True, "files": entries, **rest})
    found = read_index(tmp_path)
    assert found is not None
    return found


def test_documents_are_read_in_any_order_from_any_file(index: Index) -> None:
    reader = Reader(index, COUNTS)
    whole, stops = rows(int(COUNTS.sum())), np.cumsum(COUNTS)
    for documents in ([0], [4], [2, 3], [4, 0, 2], [1, 1]):
        places = np.concatenate([np.arange(stops[each] - COUNTS[each], stops[each]) for each in documents])
        for part, wanted in zip(reader.read(documents), whole, strict=True):
            assert torch.equal(part, wanted[places])


def test_equal_numbers_give_equal_bytes(index: Index, tmp_path: Path) -> None:
    path = index.folder / file_name(0, 2)
    before = path.read_bytes()
    write_file(path, rows(int(COUNTS[:SPLIT].sum())), COUNTS[:SPLIT], index.made_with_digest)
    assert path.read_bytes() == before
    assert entry_of(path, 0, SPLIT, "digest of another job") is None
    assert entry_of(path, 0, SPLIT + 1, index.made_with_digest) is None
    assert entry_of(tmp_path / "missing", 0, SPLIT, index.made_with_digest) is None
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("name", ["log_p", "words", "log_rest", "crc32"])
def test_a_flipped_bit_of_any_tensor_is_found_when_its_document_is_read(index: Index, name: str) -> None:
    path = index.folder / file_name(0, 2)
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    place = re.search(rf'"{name}":{{[^}}]*"data_offsets":\[(\d+)'.encode(), content[8 : 8 + header])
    assert place is not None
    content[8 + header + int(place[1])] ^= 4
    path.write_bytes(content)
    reader = Reader(index, COUNTS)
    if name != "crc32":
        reader.read([1, 3])
    damaged = "damaged, or of another" if name == "crc32" else "is damaged: the rows of document 0"
    with pytest.raises(UserError, match=rf"00000-of-00002\.safetensors .*{damaged}"):
        reader.read([0])


@pytest.mark.parametrize("what", ["word", "NaN", "above 1", "NaN of the rest", "columns of the rest"])
def test_what_no_job_writes_is_found_although_its_checksum_is_right(index: Index, what: str) -> None:
    path, counts = index.folder / file_name(0, 2), COUNTS[:SPLIT]
    found = rows(int(counts.sum()))
    if what == "word":
        found.words_Tk[-1, 0] = 99
    elif what == "NaN of the rest":
        found.log_rest_TM[-1] = torch.nan
    elif what == "columns of the rest":
        found = found._replace(log_rest_TM=found.log_rest_TM[:, :0])
    else:
        found.log_p_Tk[-1, 0] = torch.nan if what == "NaN" else 1.0
    write_file(path, found, counts, index.made_with_digest)
    entries = [vars(entry_of(path, 0, SPLIT, index.made_with_digest)), index.content["files"][1]]
    forged = Index(index.folder, {**index.content, "files": entries})
    reader = Reader(forged, COUNTS)
    if what != "columns of the rest":
        reader.read([0, 1])
    with pytest.raises(UserError, match=r"is damaged: the rows of document 2"):
        reader.read([2])


def test_a_file_of_another_job_is_found_although_it_is_whole(index: Index) -> None:
    path, counts = index.folder / file_name(0, 2), COUNTS[:SPLIT]
    before = path.read_bytes()
    for found, job in (
        (rows(int(counts.sum())), digest_of("another teacher")),
        (rows(int(counts.sum()), 2), index.made_with_digest),
    ):
        write_file(path, found, counts, job)
        with pytest.raises(UserError, match=r"is not the file that logits.json names .*; remove the file"):
            Reader(index, COUNTS).read([0])
    path.write_bytes(before)
    Reader(index, COUNTS).read([0])


@pytest.mark.parametrize(
    ("change", "of_first_file"),
    [
        ({"started_on": "soon"}, {}),
        ({"files": []}, {}),
        ({"made_with": {key: value for key, value in MADE_WITH.items() if key != "tokens"}}, {}),
        ({"made_with": None}, {}),
        ({}, {"size": 1}),
        ({}, {"first_document": 1}),
        ({}, {"name": "../x"}),
    ],
)
def test_an_index_that_no_job_writes_is_one_line(
    index: Index, change: dict[str, Any], of_first_file: dict[str, Any]
) -> None:
    first, second = index.content["files"]
    files = [{**first, **of_first_file}, second]
    write_index(index.folder, {**index.content, "files": files, **change})
    with pytest.raises(UserError, match=r"logits\.json: is not an index of precompute_logits"):
        read_index(index.folder)


def test_a_file_that_is_missing_or_cut_is_one_line_before_anything_is_read(index: Index) -> None:
    path = index.folder / file_name(1, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"has {len(content) - 1} bytes, not {len(content)}; remove it and"):
        Reader(index, COUNTS)
    assert entry_of(path, SPLIT, 2, "digest of the job") is None
    path.unlink()
    with pytest.raises(UserError, match=r"00001-of-00002\.safetensors is not there; remove it and"):
        Reader(index, COUNTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 9}', "has format 9, this lptune reads 1"),
        ('{"format": 1}', "is not an index of precompute_logits"),
        ("[]", "is not an index of precompute_logits"),
        ("{", "not valid JSON"),
    ],
)
def test_an_index_of_something_else_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert read_index(tmp_path) is None
    (tmp_path / "logits.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_index(tmp_path)
