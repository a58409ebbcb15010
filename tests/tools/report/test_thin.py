"""Fewer points keep every peak."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lptune.tools.report.rows import Column
from lptune.tools.report.thin import NUM_MEANS, is_thinned, means, thin


def column(values: np.ndarray, gaps: int = 1) -> Column:
    return Column(np.cumsum(np.arange(len(values)) % gaps + 1).astype(np.int64), values)


VALUES = arrays.arrays(
    np.float64, st.integers(1, 3000), elements=st.floats(allow_infinity=False, width=32), fill=st.floats(0, 1)
)


@given(VALUES, st.integers(1, 40), st.integers(1, 5))
def test_each_range_of_steps_keeps_its_smallest_and_its_largest_value(
    values_N: np.ndarray, num_columns: int, gaps: int
) -> None:
    every = column(values_N, gaps)
    kept = thin(every, num_columns)
    steps_N, values_N = every.finite
    assert len(kept.steps_N) <= max(2 * num_columns + 2, 0)
    assert np.all(np.diff(kept.steps_N) > 0)
    # Each point that is kept is one that was there.
    places = np.searchsorted(steps_N, kept.steps_N)
    assert np.array_equal(steps_N[places], kept.steps_N)
    assert np.array_equal(values_N[places], kept.values_N)
    if not len(steps_N):
        return
    width = max(1, int(steps_N[-1] - steps_N[0])) / num_columns
    for number in range(num_columns):
        low, high = steps_N[0] + number * width, steps_N[0] + (number + 1) * width
        # Strictly inside, so that rounding at an edge does not decide.
        inside = (steps_N > low + 1e-6) & (steps_N < high - 1e-6)
        around = (kept.steps_N >= low - 1e-6) & (kept.steps_N <= high + 1e-6)
        if inside.any():
            assert kept.values_N[around].min() <= values_N[inside].min()
            assert kept.values_N[around].max() >= values_N[inside].max()
    assert kept.steps_N[0] == steps_N[0]
    assert kept.steps_N[-1] == steps_N[-1]


def test_every_spike_of_a_long_run_is_still_there() -> None:
    random = np.random.default_rng(0)
    values_N = random.normal(1.0, 0.1, 100_000)
    spikes = random.choice(100_000, 50, replace=False)
    values_N[spikes] = 50.0 + np.arange(50)
    kept = thin(column(values_N))
    # Of two spikes in one of 400 columns the larger one stays.
    largest = {}
    for step in spikes:
        place = min(int(step / 99_999 * 400), 399)
        largest[place] = max(largest.get(place, 0.0), values_N[step])
    assert set(largest.values()) <= set(kept.values_N.tolist())
    assert len(kept.steps_N) <= 802
    assert is_thinned(len(values_N))


def test_a_short_run_keeps_all_points_but_those_that_are_not_finite() -> None:
    kept = thin(column(np.array([1.0, np.nan, 3.0])))
    assert kept.values_N.tolist() == [1.0, 3.0]
    assert not is_thinned(3)


@given(arrays.arrays(np.float64, st.integers(16, 2000), elements=st.floats(-1e6, 1e6)))
def test_a_mean_lies_between_the_extremes_and_all_of_equal_sizes_average_to_the_whole(
    values_N: np.ndarray,
) -> None:
    found = means(column(values_N))
    assert 2 <= len(found.steps_N) <= NUM_MEANS
    assert found.values_N.min() >= values_N.min() - 1e-6
    assert found.values_N.max() <= values_N.max() + 1e-6


def test_means_are_those_of_numpy() -> None:
    values_N = np.random.default_rng(0).normal(size=NUM_MEANS * 10 + 1)
    found = means(Column(np.arange(len(values_N), dtype=np.int64), values_N))
    # 1,201 steps in 120 ranges of 10; the last one has 11.
    expected = [values_N[10 * i : 10 * i + 10 + (i == NUM_MEANS - 1)].mean() for i in range(NUM_MEANS)]
    np.testing.assert_allclose(found.values_N, expected, rtol=1e-12, atol=1e-15)
