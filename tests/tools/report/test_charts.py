"""What a chart shows: every peak, ticks that people choose, colours that all eyes tell apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lptune.tools.report.charts import (
    NUM_MEANS,
    is_thinned,
    linear,
    logarithmic,
    means,
    needs_log,
    number,
    thin,
)
from lptune.tools.report.rows import Column
from lptune.tools.report.svg import COLOURS, COLOURS_DARK, NEUTRAL, NEUTRAL_DARK

# ---- points


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
    for place in range(num_columns):
        low, high = steps_N[0] + place * width, steps_N[0] + (place + 1) * width
        # Strictly inside, so that rounding at an edge does not decide.
        inside = (steps_N > low + 1e-6) & (steps_N < high - 1e-6)
        around = (kept.steps_N >= low - 1e-6) & (kept.steps_N <= high + 1e-6)
        if inside.any():
            assert kept.values_N[around].min() <= values_N[inside].min()
            assert kept.values_N[around].max() >= values_N[inside].max()
    assert (kept.steps_N[0], kept.steps_N[-1]) == (steps_N[0], steps_N[-1])


def test_a_short_run_keeps_all_points_but_those_that_are_not_finite() -> None:
    assert thin(column(np.array([1.0, np.nan, 3.0]))).values_N.tolist() == [1.0, 3.0]
    assert not is_thinned(3)


def test_means_are_those_of_numpy() -> None:
    values_N = np.random.default_rng(0).normal(size=NUM_MEANS * 10 + 1)
    found = means(Column(np.arange(len(values_N), dtype=np.int64), values_N))
    # 1,201 steps in 120 ranges of 10; the last one has 11.
    expected = [values_N[10 * i : 10 * i + 10 + (i == NUM_MEANS - 1)].mean() for i in range(NUM_MEANS)]
    np.testing.assert_allclose(found.values_N, expected, rtol=1e-12, atol=1e-15)


# ---- axes

NUMBERS = st.floats(-1e12, 1e12).map(lambda value: 0.0 if abs(value) < 1e-9 else value)


@given(NUMBERS, NUMBERS)
def test_an_axis_holds_its_values_and_has_a_few_ticks_within(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    axis = linear(low, high)
    assert axis.low <= low <= high <= axis.high
    assert 1 <= len(axis.ticks) <= 10
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    assert len(set(axis.labels)) == len(axis.labels)
    places = axis.place(np.array([low, high]))
    assert ((places >= 0) & (places <= 1)).all()


@given(st.floats(1e-12, 1e12), st.floats(1.0, 1e9))
def test_a_log_axis_does_so_too(low: float, ratio: float) -> None:
    axis = logarithmic(low, low * ratio)
    places = axis.place(np.array([low, low * ratio]))
    assert ((places >= 0) & (places <= 1)).all()
    assert len(axis.ticks) <= 7
    assert list(axis.ticks) == sorted(axis.ticks)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 100_000, "0 20k 40k 60k 80k 100k"),
        (0, 3e-3, "0 0.0005 0.0010 0.0015 0.0020 0.0025 0.0030"),
        (0, 2e-5, "0 5e-6 1e-5 1.5e-5 2e-5"),
        (-1, 1, "-1.0 -0.5 0 0.5 1.0"),
        (0, 12, "0 2 4 6 8 10 12"),
    ],
)
def test_labels_have_one_unit_and_no_more_digits_than_they_need(low: float, high: float, labels: str) -> None:
    assert " ".join(linear(low, high, pad=False).labels) == labels


def test_a_log_axis_is_taken_where_a_few_values_dwarf_the_rest() -> None:
    assert needs_log(np.array([100.0] + 50 * [1.0] + [0.9]))
    assert not needs_log(np.linspace(1, 10, 50))
    assert not needs_log(np.array([100.0] + 50 * [0.0]))  # no logarithm of 0


def test_a_number_in_a_table_has_four_digits() -> None:
    found = [number(value) for value in (0, 0.73123, 12345.6, 3e-5, 2.5e12, -1234)]
    assert found == ["0", "0.7312", "12,346", "3e-5", "2.5e12", "-1,234"]


# ---- colours

# Linear RGB as seen without the red, green or blue cones (Machado, Oliveira, Fernandes 2009, severity 1).
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # sRGB, D65


def rgb(colour: str) -> np.ndarray:
    """Linear RGB."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def contrast(a: str, b: str) -> float:
    low, high = sorted(TO_XYZ[1] @ rgb(colour) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [COLOURS, COLOURS_DARK], ids=["light", "dark"])
def test_any_two_colours_are_apart(colours: tuple[str, ...], vision: str) -> None:
    seen = [cielab(VISION[vision] @ rgb(colour)) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 20


def test_every_colour_stands_out_from_its_background() -> None:
    assert min(contrast(colour, "#ffffff") for colour in (*COLOURS, NEUTRAL)) >= 4
    assert min(contrast(colour, "#14171b") for colour in (*COLOURS_DARK, NEUTRAL_DARK)) >= 6
