"""Ticks are numbers that people choose, in a range that holds every value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lptune.tools.report import axes

NUMBERS = st.floats(-1e12, 1e12).map(lambda value: 0.0 if abs(value) < 1e-9 else value)


@given(NUMBERS, NUMBERS)
def test_an_axis_holds_its_values_and_has_a_few_ticks_within(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    axis = axes.linear(low, high)
    assert axis.low <= low <= high <= axis.high
    assert 1 <= len(axis.ticks) <= 10
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    assert len(set(axis.labels)) == len(axis.labels)
    places = axis.place(np.array([low, high]))
    assert ((places >= 0) & (places <= 1)).all()


@given(st.floats(1e-12, 1e12), st.floats(1.0, 1e9))
def test_a_log_axis_does_so_too(low: float, ratio: float) -> None:
    axis = axes.logarithmic(low, low * ratio)
    places = axis.place(np.array([low, low * ratio]))
    assert ((places >= 0) & (places <= 1)).all()
    assert len(axis.ticks) <= 7
    assert list(axis.ticks) == sorted(axis.ticks)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 100_000, ("0", "20k", "40k", "60k", "80k", "100k")),
        (0, 240, ("0", "50", "100", "150", "200")),
        (0, 3e-3, ("0", "0.0005", "0.0010", "0.0015", "0.0020", "0.0025", "0.0030")),
        (0, 2e-5, ("0", "5e-6", "1e-5", "1.5e-5", "2e-5")),
        (0, 1, ("0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        (0, 25_000, ("0", "5k", "10k", "15k", "20k", "25k")),
        (-1, 1, ("-1.0", "-0.5", "0", "0.5", "1.0")),
        (0, 12, ("0", "2", "4", "6", "8", "10", "12")),
    ],
)
def test_labels_have_one_unit_and_no_more_digits_than_they_need(
    low: float, high: float, labels: tuple[str, ...]
) -> None:
    assert axes.linear(low, high, pad=False).labels == labels


def test_a_log_axis_is_taken_where_a_few_values_dwarf_the_rest() -> None:
    assert axes.needs_log(np.array([100.0] + 50 * [1.0] + [0.9]))
    assert not axes.needs_log(np.linspace(1, 10, 50))
    assert not axes.needs_log(np.array([100.0] + 50 * [0.0]))  # no logarithm of 0
    assert not axes.needs_log(np.array([1.0]))


def test_a_number_in_a_table_has_four_digits() -> None:
    for value, text in (
        (0, "0"),
        (0.73123, "0.7312"),
        (12345.6, "12,346"),
        (3e-5, "3e-5"),
        (2.5e12, "2.5e12"),
    ):
        assert axes.number(value) == text
