"""Do rectangles tile a matrix: no gap, no overlap? And do the rows of a file belong to one of them each?

Where several ranks wrote their parts of a tensor, a gap is weights that would stay as they were before
loading, and an overlap is two answers to one question.

Compared pair by pair, the parts of a thousand ranks would take half a million comparisons per tensor. A count
of corners does it in one pass. Let f(point) be the number of rectangles over a point. Each corner flips the
parity of f for all points to its lower right, so if the corners that occur an odd number of times are exactly
those of the whole matrix, f is odd inside it, hence at least 1. If the areas also add up to the matrix's, f
is 1 everywhere.
"""

from collections.abc import Sequence

Rectangle = tuple[int, int, int, int]
"""First row, number of rows, first column, number of columns; both numbers at least 1."""


def check_tiling(name: str, parts: Sequence[Rectangle]) -> None:
    """ValueError unless `parts` tile the matrix from (0, 0) to the end of the last of them."""
    odd: set[tuple[int, int]] = set()
    for row, rows, column, columns in parts:
        for corner in _corners(row, rows, column, columns):
            odd ^= {corner}
    num_rows = max(row + rows for row, rows, _, _ in parts)
    num_columns = max(column + columns for _, _, column, columns in parts)
    area = sum(rows * columns for _, rows, _, columns in parts)
    if odd != set(_corners(0, num_rows, 0, num_columns)) or area != num_rows * num_columns:
        raise ValueError(
            f"shards: {name!r}: its parts overlap or leave a gap in {num_rows} x {num_columns} elements"
        )


def check_rows(name: str, parts: Sequence[tuple[int, int]], num_rows: int) -> None:
    """ValueError unless the runs (first row, number of rows) of a file follow each other up to `num_rows`."""
    end = 0
    for at, rows in sorted(parts):
        if at != end:
            break
        end = at + rows
    if end != num_rows:
        raise ValueError(
            f"{name!r} has {num_rows} rows, the manifest knows {end} of them one after the other"
        )


def _corners(row: int, rows: int, column: int, columns: int) -> list[tuple[int, int]]:
    return [(y, x) for y in (row, row + rows) for x in (column, column + columns)]
