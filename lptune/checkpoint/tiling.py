"""Checks that boxes tile a tensor, without gap or overlap, and that each row of a file is in one box.

Several ranks write parts of a tensor. After a gap, some weights would keep the values from before loading.
With an overlap, an element would have two values.

Comparing all pairs of parts takes half a million comparisons per tensor for a thousand ranks. Counting
corners takes one pass. Let f(point) be the number of boxes that contain a point. Each corner flips the parity
of f for all points beyond it in every dimension. So if the corners that occur an odd number of times are
exactly the corners of the whole tensor, f is odd inside it, hence at least 1. If the volumes of the boxes
also add up to the volume of the tensor, f is 1 everywhere.
"""

import itertools
import math
from collections.abc import Sequence

Box = Sequence[tuple[int, int]]
"""(first, number) of each dimension, with number >= 1. For a matrix: rows, columns."""


def check_tiling(name: str, parts: Sequence[Box]) -> None:
    """Raises ValueError unless `parts` tile a tensor, whose sizes are the largest ends of the parts."""
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
    """Raises ValueError unless the row ranges (first, number) in a file follow one another to `num_rows`."""
    end = 0
    for at, rows in sorted(parts):
        if at != end:
            break
        end = at + rows
    if end != num_rows:
        raise ValueError(
            f"{name!r} has {num_rows} rows, but the manifest lists only {end} without gap or overlap"
        )


def _corners(part: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*((first, first + number) for first, number in part)))
