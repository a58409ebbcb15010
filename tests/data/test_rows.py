"""Batches against a naive reference: labels, positions, documents and offsets, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lptune.data import Loader, Rows, documents, evaluation_batches, pack
from lptune.data.documents import Documents
from lptune.data.packing import one_document_per_row
from lptune.data.rows import EMPTY_ROW, IGNORE
from tests.helpers.documents import numbered

SEQ_LEN = 16
PAD = 999


def make_rows(lengths: list[int], *, seed: int = 0, packing: bool = True) -> Rows:
    chosen = pack(lengths, SEQ_LEN, seed) if packing else one_document_per_row(len(lengths))
    return Rows(numbered(lengths, 1000), chosen, seq_len=SEQ_LEN, pad_id=PAD)


LENGTHS = st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=40)


@given(LENGTHS, st.booleans())
def test_a_batch_equals_the_naive_reference(lengths: list[int], packing: bool) -> None:
    rows = make_rows(lengths, packing=packing)
    numbers = [*range(rows.num_rows), EMPTY_ROW]
    batch = rows.batch(numbers)
    starts = []
    for b, row in enumerate(numbers):
        documents = [] if row == EMPTY_ROW else rows.packing.row(row).tolist()
        tokens, labels, positions, document = [], [], [], []
        for i, number in enumerate(documents):
            starts.append(b * SEQ_LEN + len(tokens))
            own = range(rows.documents.offsets_N1[number], rows.documents.offsets_N1[number + 1])
            for place, t in enumerate(own):
                has_next = t + 1 in own and rows.documents.is_target_T[t + 1]
                tokens.append(int(rows.documents.tokens_T[t]))
                labels.append(int(rows.documents.tokens_T[t + 1]) if has_next else IGNORE)
                positions.append(place)
                document.append(i)
        if len(tokens) < SEQ_LEN:
            starts.append(b * SEQ_LEN + len(tokens))
        rest = SEQ_LEN - len(tokens)
        assert batch.tokens_BS[b].tolist() == tokens + [PAD] * rest
        assert batch.labels_BS[b].tolist() == labels + [IGNORE] * rest
        assert batch.positions_BS[b].tolist() == positions + list(range(rest))
        assert batch.document_BS[b].tolist() == document + [len(documents)] * rest
    assert batch.offsets.tolist()[: len(starts)] == starts
    assert set(batch.offsets.tolist()[len(starts) :]) == {len(numbers) * SEQ_LEN}
    assert len(batch.offsets) == rows.most_documents(len(numbers)) + 1
    assert batch.num_targets == int((batch.labels_BS != IGNORE).sum())


@given(LENGTHS)
def test_all_rows_together_have_every_target_once(lengths: list[int]) -> None:
    rows = make_rows(lengths)
    batch = rows.batch(range(rows.num_rows))
    labels = batch.labels_BS[batch.labels_BS != IGNORE].tolist()
    assert sorted(labels) == rows.documents.tokens_T[rows.documents.is_target_T].tolist()
    assert rows.num_target_tokens == batch.num_targets
    assert rows.num_tokens == sum(lengths)
    assert rows.fill == sum(lengths) / (rows.num_rows * SEQ_LEN)


def test_a_row_of_many_documents_does_not_make_every_batch_as_long() -> None:
    # Flash attention's backward takes memory for each slot of `offsets`, and it was the longest row's number
    # of documents times the rows of a batch.
    rows = make_rows([2] * 8 + [16] * 30)
    assert rows.most_documents(1) == 8
    assert rows.most_documents(4) == 8 + 8 + 1 + 1  # that row may end an epoch and begin the next
    assert rows.most_documents(rows.num_rows) == 8 + 8 + rows.num_rows - 2


@given(st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=12), st.integers(1, 9))
def test_no_batch_of_the_stream_has_more_documents_than_its_slots(lengths: list[int], size: int) -> None:
    rows = make_rows(lengths)
    for first in range(3 * rows.num_rows):
        batch = rows.batch([rows.row_at(sample, 0) for sample in range(first, first + size)])
        num_documents = int((batch.document_BS.amax(1) + 1).sum())
        assert num_documents <= rows.most_documents(size) == len(batch.offsets) - 1


def test_rows_say_whether_each_is_one_document() -> None:
    assert make_rows([5, 16, 9], packing=False).one_document_per_row  # padding apart
    assert make_rows([9, 16, 10]).one_document_per_row  # nothing fits beside another
    packed = make_rows([5, 16, 9])
    assert not packed.one_document_per_row
    # A property of all rows: batches of one document among others are not told apart.
    alone = next(row for row in range(packed.num_rows) if np.diff(packed.packing.row_offsets)[row] == 1)
    assert not packed.batch([alone]).one_document_per_row
    assert make_rows([16]).batch([0, EMPTY_ROW]).to("cpu").one_document_per_row


def test_the_digest_tells_contents_packing_and_length_apart() -> None:
    base = make_rows([5, 8, 3])
    assert base.digest == make_rows([5, 8, 3]).digest
    others = [make_rows([5, 8, 4]), make_rows([8, 5, 3]), make_rows([5, 8, 3], packing=False)]
    flipped = make_rows([5, 8, 3])
    flipped.documents.is_target_T[1] ^= True
    assert len({rows.digest for rows in [base, *others, flipped]}) == 5


def stream(
    rows: Rows, *, num_ranks: int, steps: int, micro: int = 2, total: int = 12
) -> list[list[list[int]]]:
    """Micro-batches (their tokens) of each step, ranks one after the other."""
    loaders = [
        Loader(rows, seed=3, global_batch_size=total, micro_batch_size=micro, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    return [
        [batch.tokens_BS.flatten().tolist() for loader in loaders for batch in loader.micro_batches(step)]
        for step in range(steps)
    ]


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([2, 3, 6]))
def test_any_number_of_ranks_sees_the_stream_of_one(lengths: list[int], num_ranks: int) -> None:
    rows = make_rows(lengths)
    is_same = stream(rows, num_ranks=num_ranks, steps=4) == stream(rows, num_ranks=1, steps=4)
    assert is_same  # pytest would take minutes to show where the lists differ, in each try of hypothesis


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.booleans(), st.sampled_from([1, 3]))
def test_the_targets_of_a_step_are_those_of_all_ranks_micro_batches(
    lengths: list[int], packing: bool, num_ranks: int
) -> None:
    rows = make_rows(lengths, packing=packing)
    loaders = [
        Loader(rows, seed=3, global_batch_size=6, micro_batch_size=2, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    for step in range(3):
        counted = sum(batch.num_targets for loader in loaders for batch in loader.micro_batches(step))
        assert [loader.num_targets(step) for loader in loaders] == [counted] * num_ranks


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3))
def test_epochs_follow_each_other_without_losing_a_row(num_rows: int, num_epochs: int) -> None:
    rows = make_rows([SEQ_LEN] * num_rows)
    loader = Loader(rows, seed=0, global_batch_size=6, micro_batch_size=3)
    steps = loader.num_steps(num_epochs)
    assert (steps - 1) * 6 < num_epochs * num_rows <= steps * 6
    seen = [rows.row_at(sample, 0) for sample in range(steps * 6)]
    for epoch in range(num_epochs):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    firsts = [
        batch.tokens_BS[i, 0].item()
        for step in range(steps)
        for batch in loader.micro_batches(step)
        for i in range(3)
    ]
    assert firsts == [1000 + SEQ_LEN * rows.packing.documents[row] for row in seen]


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_sees_every_row_once_in_batches_of_one_shape(
    num_rows: int, batch_size: int, num_ranks: int
) -> None:
    rows = make_rows([SEQ_LEN] * num_rows)
    by_rank = [
        list(evaluation_batches(rows, batch_size, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in by_rank}) == 1, "ranks that leave early hang the others"
    batches = [batch for batches in by_rank for batch in batches]
    assert {tuple(batch.tokens_BS.shape) for batch in batches} == {(batch_size, SEQ_LEN)}
    firsts = [first for batch in batches for first in batch.tokens_BS[:, 0].tolist() if first != PAD]
    assert sorted(firsts) == [1000 + SEQ_LEN * row for row in range(num_rows)]
    assert sum(batch.num_targets for batch in batches) == rows.num_target_tokens


@given(LENGTHS, st.booleans())
def test_document_lengths_are_those_of_the_documents_in_a_batch(lengths: list[int], packing: bool) -> None:
    rows = make_rows(lengths, packing=packing)
    loader = Loader(rows, seed=0, global_batch_size=4, micro_batch_size=2)
    for step in (0, 3):
        expected: list[int] = []
        for batch in loader.micro_batches(step):
            if batch.one_document_per_row:  # plain causal attention over the whole row
                expected += [SEQ_LEN] * len(batch.tokens_BS)
            else:
                expected += np.diff(np.unique(batch.offsets.numpy())).tolist()
        assert sorted(loader.document_lengths(step).tolist()) == sorted(expected)


@given(LENGTHS, st.integers(0, 2**16), st.integers(1, 40))
def test_documents_chosen_from_a_larger_array_are_those_documents(
    lengths: list[int], seed: int, piece: int
) -> None:
    whole = make_rows(lengths).documents
    numbers = np.random.default_rng(seed).permutation(len(lengths))[: max(1, len(lengths) // 2)]
    chosen, packing = whole.select(numbers), one_document_per_row(len(numbers))
    places = [np.arange(*whole.place(number)) for number in numbers]
    take = np.concatenate(places)
    copied = Documents(
        tokens_T=whole.tokens_T[take], is_target_T=whole.is_target_T[take], offsets_N1=chosen.offsets_N1,
        answers_N2=whole.answers_N2[numbers], prompt_keys_N=whole.prompt_keys_N[numbers],
    )  # fmt: skip
    assert chosen.tokens_T is whole.tokens_T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_TOKENS", piece)
        ours, theirs = (Rows(each, packing, seq_len=SEQ_LEN, pad_id=PAD) for each in (chosen, copied))
        assert ours.digest == theirs.digest
    assert ours.num_target_tokens == theirs.num_target_tokens == np.count_nonzero(copied.is_target_T)
    everything = [*range(ours.num_rows)]
    for a, b in zip(ours.batch(everything)[:5], theirs.batch(everything)[:5], strict=True):
        assert torch.equal(a, b)
    assert ours.prompt_and_answer(0) == theirs.prompt_and_answer(0)
