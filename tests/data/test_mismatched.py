"""Mismatched documents: every answer serves another prompt, and packed rows keep their sizes."""

import numpy as np
import numpy.typing as npt
import pytest

from lptune.data import Loader, Packing, Rows
from lptune.data.documents import Documents, concatenated, joined, offsets_of
from lptune.data.packing import one_document_per_row, pack

SEQ_LEN = 64


def made(num_documents: int, *, prompts: int, packing: bool = True, seed: int = 0) -> Rows:
    """Documents whose tokens say where they are from: prompts of 100 * i, answers of 100 * i + 1. Document i
    has the key of prompt i % prompts.
    """
    draw = np.random.default_rng(seed)
    sizes = np.stack([draw.integers(1, 9, num_documents), draw.integers(1, 14, num_documents)], 1)
    tokens = [np.repeat([100 * i, 100 * i + 1], size) for i, size in enumerate(sizes)]
    lengths = sizes.sum(1)
    documents = Documents(
        tokens_T=np.concatenate(tokens).astype(np.int32),
        is_target_T=np.concatenate(tokens) % 100 == 1,
        offsets_N1=offsets_of(lengths),
        answers_N2=np.stack([sizes[:, 0], lengths], 1).astype(np.int32),
        prompt_keys_N=(np.arange(num_documents) % prompts).astype(np.uint64) * 7919 % 1009,
    )
    packed = pack(lengths, SEQ_LEN, seed) if packing else one_document_per_row(num_documents)
    return Rows(documents, packed, seq_len=SEQ_LEN, pad_id=0)


def tokens_of(rows: Rows, number: int) -> npt.NDArray[np.int32]:
    start, stop = rows.documents.place(number)
    return np.asarray(rows.documents.tokens_T[start:stop])


def sources(rows: Rows) -> npt.NDArray[np.int64]:
    """For each document of `rows.mismatched`, the number of the document that its answer is from, after a
    comparison of all its tokens and targets with the two documents that it is made of.
    """
    found = np.empty(rows.num_documents, dtype=np.int64)
    other = rows.mismatched
    for i in range(rows.num_documents):
        tokens = tokens_of(other, i)
        prompt, answer = tokens[tokens % 100 == 0], tokens[tokens % 100 == 1]
        assert np.array_equal(prompt, tokens_of(rows, i)[tokens_of(rows, i) % 100 == 0])
        found[i] = answer[0] // 100
        whole = tokens_of(rows, found[i])
        whole = whole[whole % 100 == 1]
        assert np.array_equal(answer, whole[: len(answer)])
        assert len(answer) == len(whole) or len(tokens) == rows.seq_len, "cut where the row ends, not before"
        start, stop = other.documents.place(i)
        assert np.array_equal(other.documents.is_target_T[start:stop], tokens % 100 == 1)
        assert other.documents.answers_N2[i].tolist() == [len(prompt), len(tokens)]
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("prompts", [60, 30, 20])
def test_each_answer_serves_another_prompt_once(prompts: int, packing: bool) -> None:
    rows = made(60, prompts=prompts, packing=packing)
    from_N, keys_N = sources(rows), rows.documents.prompt_keys_N
    assert sorted(from_N) == list(range(60))
    same = keys_N[from_N] == keys_N
    if prompts == 60 or not packing:
        assert not same.any()
    row_of = np.empty(60, dtype=np.int64)
    row_of[rows.packing.documents] = np.repeat(np.arange(rows.num_rows), rows.num_documents_per_row)
    for row in np.flatnonzero(rows.num_documents_per_row > 1):
        numbers = np.flatnonzero(row_of == row)
        assert set(from_N[numbers]) == set(numbers), "the answers of the row"
        most = np.unique(keys_N[numbers], return_counts=True)[1].max()
        assert most > len(numbers) // 2 or not same[numbers].any()


def test_packed_rows_have_the_same_size_and_samples() -> None:
    rows = made(60, prompts=60)
    assert rows.num_documents_per_row.min() > 1
    assert rows.mismatched.num_tokens == rows.num_tokens
    assert rows.mismatched.num_target_tokens == rows.num_target_tokens
    num_documents = 0
    for rank in range(2):
        loader = Loader(rows, seed=3, global_batch_size=4, micro_batch_size=1, rank=rank, num_ranks=2)
        for batch, other in zip(loader.micro_batches(1), loader.mismatched(1), strict=True):
            num_documents += int((batch.numbers_D >= 0).sum())
            assert batch.numbers_D.tolist() == other.numbers_D.tolist()
            assert batch.num_targets == other.num_targets
            used = batch.document_BS[0].bincount()
            assert used.shape == other.document_BS[0].bincount().shape
    assert loader.num_documents(1) == num_documents


def test_documents_alone_in_their_rows_are_cut_where_the_row_ends() -> None:
    rows = made(40, prompts=40, packing=False)
    short = Rows(rows.documents, rows.packing, seq_len=int(rows.documents.lengths.max()), pad_id=0)
    sources(short)
    lengths = short.mismatched.documents.lengths
    assert lengths.max() == short.seq_len
    assert (short.mismatched.documents.num_targets_N > 0).all()


def test_one_document_alone_takes_the_answer_of_a_packed_one() -> None:
    rows = made(5, prompts=5)
    packing = Packing(np.arange(5), np.array([0, 4, 5]))
    lone = Rows(rows.documents, packing, seq_len=SEQ_LEN * 2, pad_id=0)
    from_N = sources(lone)
    assert sorted(from_N[:4]) == [0, 1, 2, 3]
    assert from_N[4] != 4
    single = Rows(rows.documents.select(np.array([2])), one_document_per_row(1), seq_len=SEQ_LEN, pad_id=0)
    assert tokens_of(single.mismatched, 0).tolist() == tokens_of(single, 0).tolist(), "there is no other"


def test_equal_prompts_in_a_row_of_two_swap_their_answers() -> None:
    rows = made(2, prompts=1)
    assert rows.num_rows == 1
    assert sources(rows).tolist() == [1, 0]


def test_a_selection_of_several_sources_gives_the_same_documents() -> None:
    parts = [made(11, prompts=11).documents, made(19, prompts=19, seed=1).documents]
    order = np.random.default_rng(1).permutation(30)
    found = []
    for each in (concatenated(parts), joined(parts)):
        selected = each.select(order)
        rows = Rows(selected, pack(selected.lengths, SEQ_LEN, 0), seq_len=SEQ_LEN, pad_id=0)
        found.append(rows.mismatched.digest)
    assert found[0] == found[1]
