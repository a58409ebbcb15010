"""Every document stands in exactly one row, whole; rows are as full as best-fit decreasing makes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lptune.data import Packing, pack
from lptune.data.order import permutation, random_keys, shuffled
from lptune.data.packing import NEARLY_FULL, cut_to_fill

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Space left in each row, one document after the other: the plain algorithm."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(left)) if left[row] >= length]
        if fitting:
            left[min(fitting, key=lambda row: left[row])] -= length
        else:
            left.append(capacity - length)
    return left


def space_left(packing: Packing, lengths: list[int], capacity: int) -> list[int]:
    tokens = np.asarray(lengths)[packing.documents]
    return (capacity - np.add.reduceat(tokens, packing.row_offsets[:-1])).tolist()


@given(LENGTHS, st.integers(64, 100), st.integers(0, 3))
def test_every_document_is_packed_once_and_no_row_overflows(
    lengths: list[int], capacity: int, seed: int
) -> None:
    packing = pack(lengths, capacity, seed)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    assert packing.row_offsets[0] == 0
    assert packing.row_offsets[-1] == len(lengths)
    assert (np.diff(packing.row_offsets) > 0).all(), "no row is empty"
    assert min(space_left(packing, lengths, capacity)) >= 0


@given(LENGTHS, st.integers(64, 100))
def test_placing_groups_equals_best_fit_decreasing_one_by_one(lengths: list[int], capacity: int) -> None:
    assert sorted(space_left(pack(lengths, capacity, 0), lengths, capacity)) == sorted(
        best_fit_decreasing(lengths, capacity)
    )


def test_packing_depends_on_lengths_and_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    first, again, other = pack(lengths, 64, 1), pack(lengths.tolist(), 64, 1), pack(lengths, 64, 2)
    assert np.array_equal(first.documents, again.documents)
    assert np.array_equal(first.row_offsets, again.row_offsets)
    assert not np.array_equal(first.documents, other.documents)
    assert first.num_rows == other.num_rows


@settings(max_examples=30)
@given(st.integers(0, 2**63), st.integers(0, 2**31), st.integers(1, 300))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, num_rows: int) -> None:
    order = permutation(seed, epoch, num_rows)
    assert sorted(order.tolist()) == list(range(num_rows))


def test_orders_differ_between_seeds_and_epochs_and_never_change() -> None:
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    # The stream of Philox is guaranteed by numpy; a change of these numbers would break every resume.
    assert permutation(0, 0, 10).tolist() == [6, 5, 7, 8, 0, 9, 3, 4, 1, 2]
    assert random_keys(7, "packing", 2).tolist() == [3586410811760743958, 11644992548695711192]


def test_ranks_depend_on_key_and_seed_alone() -> None:
    keys = np.arange(100, dtype=np.uint64)
    ranks = shuffled(keys, 5)
    assert np.array_equal(shuffled(keys[::-1], 5), ranks[::-1])
    assert len(set(ranks.tolist())) == 100
    assert not np.array_equal(ranks, shuffled(keys, 6))
    assert abs((np.argsort(ranks) < 50)[:50].mean() - 0.5) < 5 * 0.5 / np.sqrt(50)


def filled(lengths: list[int], capacity: int) -> list[list[tuple[int, int, int]]]:
    """Texts end to end, cut where a row ends, one token after the other: rows of (text, start, length)."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    for text, length in enumerate(lengths):
        start = 0
        while start < length - 1:  # a token that is left alone was predicted in the part before
            space = capacity - sum(part[2] for part in rows[-1])
            if space < 2:  # a part of one token predicts nothing
                rows.append([])
                continue
            rows[-1].append((text, start, min(space, length - start)))
            start += min(space, length - start) - 1
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_cut_as_a_plain_loop_cuts_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity = int(random.integers(4, 40))
    lengths = random.integers(2, capacity + 1, size=int(random.integers(1, 60)))
    packing = pack(lengths, capacity, seed)
    tokens = np.add.reduceat(lengths[packing.documents], packing.row_offsets[:-1])
    loose = [row for row in range(packing.num_rows) if tokens[row] < NEARLY_FULL * capacity]
    whole = [row for row in range(packing.num_rows) if row not in loose]
    rows = [packing.row(row) for row in loose]
    order = np.concatenate([*rows, np.zeros(0, np.int64)]).tolist()
    expected = filled([int(lengths[text]) for text in order], capacity) if order else []
    found = cut_to_fill(lengths, np.ones(len(lengths), bool), packing, capacity)
    if len(expected) >= len(loose):
        assert found is None
        return
    assert found is not None
    parts, cut = found
    assert cut.num_rows == len(whole) + len(expected)
    made = [
        list(zip(*(array[cut.row(row)].tolist() for array in parts), strict=True))
        for row in range(cut.num_rows)
    ]
    assert made[len(whole) :] == [[(order[i], start, length) for i, start, length in row] for row in expected]
    kept = [packing.row(row).tolist() for row in whole]
    assert made[: len(whole)] == [[(text, 0, int(lengths[text])) for text in row] for row in kept]
    # Every token but the first of each text is predicted once.
    targets = sorted(
        (n, i) for n, start, length in zip(*parts, strict=True) for i in range(start + 1, start + length)
    )
    assert targets == [(n, i) for n, length in enumerate(lengths) for i in range(1, length)]


def test_only_texts_are_cut_and_full_rows_stay() -> None:
    lengths = np.array([6, 6, 6, 10, 6, 6])
    is_text = np.array([False, True, True, True, True, True])
    packing = pack(lengths, 10, 0)
    found = cut_to_fill(lengths, is_text, packing, 10)
    assert found is not None
    parts, cut = found
    assert set(parts.numbers[parts.lengths < lengths[parts.numbers]]) <= {1, 2, 4, 5}
    assert cut.num_rows == 5  # 24 tokens of texts in three rows in place of four, with two tokens read twice
    assert cut_to_fill(lengths, np.zeros(6, bool), packing, 10) is None
    assert cut_to_fill([10, 10], np.ones(2, bool), pack([10, 10], 10, 0), 10) is None
