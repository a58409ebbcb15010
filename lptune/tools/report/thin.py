"""Fewer points for a chart, without losing a peak.

A chart is a few hundred pixels wide, and a run may have a hundred thousand steps. Taking every n-th point
would drop most spikes, and a mean would flatten them. Here the steps are divided into as many columns as the
chart has pixels, and of each column the smallest and the largest value stay, at their own steps. On a screen
that is the same picture as all points, for a line between points of one column covers the column from its
smallest to its largest value in either case.
"""

import numpy as np
import numpy.typing as npt

from lptune.tools.report.rows import Column

NUM_COLUMNS = 400
"""Pixel columns of a chart. Up to twice as many points stay, and both ends."""
NUM_MEANS = 120
"""Most points of a mean through noisy values; fewer where there are not 8 values for each."""


def is_thinned(num_points: int) -> bool:
    """Whether `thin` leaves points out of so many."""
    return num_points > 2 * NUM_COLUMNS


def thin(column: Column, num_columns: int = NUM_COLUMNS) -> Column:
    """The smallest and the largest value of each of `num_columns` equal ranges of steps, and the first and
    the last point. All points, if there are no more than `2 * num_columns`. NaNs are left out.
    """
    steps_N, values_N = column.finite
    if len(steps_N) <= 2 * num_columns:
        return Column(steps_N, values_N)
    bin_N = _bins(steps_N, num_columns)
    # By column, and by value within it: the first of each column is its smallest, the last its largest.
    order_N = np.lexsort((values_N, bin_N))
    is_first_N = np.append(True, np.diff(bin_N[order_N]) > 0)
    is_last_N = np.append(is_first_N[1:], True)
    chosen = np.unique(np.concatenate([order_N[is_first_N], order_N[is_last_N], [0, len(steps_N) - 1]]))
    return Column(steps_N[chosen], values_N[chosen])


def means(column: Column) -> Column:
    """The mean of each of up to NUM_MEANS equal ranges of steps, at the middle of its steps. NaNs are left
    out. With fewer than 16 points, the points.
    """
    steps_N, values_N = column.finite
    num_columns = min(NUM_MEANS, len(steps_N) // 8)
    if num_columns < 2:
        return Column(steps_N, values_N)
    bin_N = _bins(steps_N, num_columns)
    starts = np.flatnonzero(np.append(True, np.diff(bin_N) > 0))
    counts = np.diff(np.append(starts, len(steps_N)))
    steps = np.add.reduceat(steps_N.astype(float), starts) / counts
    return Column(np.rint(steps).astype(np.int64), np.add.reduceat(values_N, starts) / counts)


def _bins(steps_N: npt.NDArray[np.int64], num_columns: int) -> npt.NDArray[np.int64]:
    """The pixel column of each step, 0 to num_columns - 1."""
    first, last = int(steps_N[0]), int(steps_N[-1])
    place_N = (steps_N - first) / max(1, last - first) * num_columns
    return np.minimum(place_N.astype(np.int64), num_columns - 1)
