"""Do boxes tile a tensor: no gap, no overlap? And do the rows of a file belong to one of them each?

Where several ranks wrote their parts of a tensor, a gap is weights that would stay as they were before
loading, and an overlap is two answers to one question.

Compared pair by pair, the parts of a thousand ranks would take half a million comparisons per tensor. A count
of corners does it in one pass. Let f(point) be the number of boxes over a point. Each corner flips the parity
of f for all points beyond it in every dimension, so if the corners that occur an odd number of times are
exactly those of the whole tensor, f is odd inside it, hence at least 1. If the volumes also add up to the
tensor's, f is 1 everywhere.
"""

import itertools
import math
from collections.abc import Sequence

Box = Sequence[tuple[int, int]]
"""(first, number) of each dimension, at least one element each. A matrix: rows and columns."""


def check_tiling(name: str, parts: Sequence[Box]) -> None:
    """ValueError unless `parts` tile the tensor from its first element to the end of the last of them."""
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"shards: {name!r}: its parts have different numbers of dimensions")
    odd: set[tuple[int, ...]] = set()
    for part in parts:
        for corner in _corners(part):
            odd ^= {corner}
    sizes = [max(first + number for first, number in dim) for dim in zip(*parts, strict=True)]
    volume = sum(math.prod(number for _, number in part) for part in parts)
    if odd != set(_corners([(0, size) for size in sizes])) or volume != math.prod(sizes):
        raise ValueError(
            f"shards: {name!r}: its parts overlap or leave a gap in {' x '.join(map(str, sizes))} elements"
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


def _corners(part: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*((first, first + number) for first, number in part)))
