"""What counts as a tiling, against counting every cell."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lptune.checkpoint.tiling import check_rows, check_tiling

SIDE = st.integers(1, 3)
START = st.integers(0, 3)
PARTS = st.lists(st.tuples(START, SIDE, START, SIDE), min_size=1, max_size=6)


def accepted(parts: list[tuple[int, int, int, int]]) -> bool:
    try:
        check_tiling("w", parts)
    except ValueError:
        return False
    return True


def covered_once(parts: list[tuple[int, int, int, int]]) -> bool:
    cells = [(y, x) for r, h, c, w in parts for y in range(r, r + h) for x in range(c, c + w)]
    whole = {(y, x) for y in range(max(y for y, _ in cells) + 1) for x in range(max(x for _, x in cells) + 1)}
    return len(cells) == len(whole) and set(cells) == whole


@given(PARTS)
def test_parts_tile_if_and_only_if_each_cell_is_in_one(parts: list[tuple[int, int, int, int]]) -> None:
    assert accepted(parts) == covered_once(parts)


@given(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4), st.randoms())
def test_any_grid_tiles_and_one_part_less_or_twice_does_not(
    row_cuts: list[int], column_cuts: list[int], choose: random.Random
) -> None:
    rows, columns = (sorted({0, 10, *cuts}) for cuts in (row_cuts, column_cuts))
    parts = [(r, r_end - r, c, c_end - c) for r, r_end in pairwise(rows) for c, c_end in pairwise(columns)]
    choose.shuffle(parts)
    assert accepted(parts)
    assert not accepted(parts + parts[:1])
    if len(parts) > 2:
        middle = [part for part in parts if part[0] + part[1] < 10 or part[2] + part[3] < 10]
        assert not accepted([part for part in parts if part is not middle[0]])


def test_rows_of_a_file_follow_each_other() -> None:
    check_rows("w", [(3, 2), (0, 3)], 5)
    for parts, num_rows in (([(0, 3)], 4), ([(0, 3), (2, 2)], 4), ([(1, 3)], 4), ([(0, 3), (4, 1)], 5)):
        with pytest.raises(ValueError, match="'w' has"):
            check_rows("w", parts, num_rows)
