"""What counts as a tiling, against counting every cell."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lptune.checkpoint.manifest import check_rows, check_tiling

Box = tuple[tuple[int, int], ...]
_DIM = st.tuples(st.integers(0, 2), st.integers(1, 3))
PARTS = st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*n * [_DIM]), min_size=1, max_size=6))


def accepted(parts: list[Box]) -> bool:
    try:
        check_tiling("w", parts)
    except ValueError:
        return False
    return True


def covered_once(parts: list[Box]) -> bool:
    cells = [cell for part in parts for cell in itertools.product(*(range(a, a + n) for a, n in part))]
    ends = [max(place) + 1 for place in zip(*cells, strict=True)]
    whole = set(itertools.product(*(range(end) for end in ends)))
    return len(cells) == len(whole) and set(cells) == whole


@given(PARTS)
def test_parts_tile_if_and_only_if_each_cell_is_in_one(parts: list[Box]) -> None:
    assert accepted(parts) == covered_once(parts)


def test_parts_of_different_numbers_of_dimensions_tile_nothing() -> None:
    with pytest.raises(ValueError, match="'w': its parts have different numbers of dimensions"):
        check_tiling("w", [((0, 1), (0, 2)), ((1, 1), (0, 2), (0, 1))])


def test_rows_of_a_file_follow_each_other() -> None:
    check_rows("w", [(3, 2), (0, 3)], 5)
    for parts, num_rows in (([(0, 3)], 4), ([(0, 3), (2, 2)], 4), ([(1, 3)], 4), ([(0, 3), (4, 1)], 5)):
        with pytest.raises(ValueError, match="'w' has"):
            check_rows("w", parts, num_rows)
