"""Axes: which range a chart shows, where its ticks are, and how numbers are written.

A tick stands at a number that people would choose: 1, 2 or 5 times a power of ten. A logarithmic axis is
taken where a linear one would press most of a curve into its lowest tenth, as the loss of the first steps
does to the rest.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Axis(NamedTuple):
    """A range of numbers that is mapped to 0 … 1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    def place(self, values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Where values lie between `low` (0) and `high` (1)."""
        values_N = np.clip(values_N, self.low, self.high)
        if self.is_log:
            return (np.log10(values_N) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low)
            )
        return (values_N - self.low) / (self.high - self.low)


def linear(low: float, high: float, num_ticks: int = 5, *, pad: bool = True) -> Axis:
    """An axis from `low` to `high`, with about `num_ticks` ticks. pad: with a margin, but not below 0 where
    all values are above it.
    """
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
        margin = abs(low) * 0.05 or 0.5
        low, high = low - margin, high + margin
        pad = False
    elif pad:
        margin = (high - low) * 0.05
        low, high = (low if low == 0 else max(low - margin, 0.0) if low > 0 else low - margin), high + margin
    step = _step((high - low) / num_ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(low, high, ticks, labels(ticks, step))


def logarithmic(low: float, high: float) -> Axis:
    """An axis of powers of ten from `low` to `high`, both above 0; with 2 and 5 between where few fit."""
    low, high = low * 0.9, high * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for between, most in (((1, 2, 5), 6), ((1, 3), 6), ((1,), 7)):
        ticks = tuple(tick for n in decades for m in between if low <= (tick := m * 10.0**n) <= high)
        if len(ticks) <= most:
            break
    else:
        ticks = ticks[:: math.ceil(len(ticks) / 6)]
    return Axis(low, high, ticks, tuple(number(tick) for tick in ticks), is_log=True)


def needs_log(values_N: npt.NDArray[np.float64]) -> bool:
    """Whether a linear axis would press half of the values into its lowest tenth."""
    if len(values_N) < 2 or values_N.min() <= 0:
        return False
    low, high, middle = values_N.min(), values_N.max(), np.median(values_N)
    return bool(high / low > 5 and (middle - low) < 0.1 * (high - low))


def _step(rough: float) -> float:
    """The nearest of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return float(min((1, 2, 5, 10), key=lambda choice: abs(math.log(choice * power / rough))) * power)


def labels(ticks: Sequence[float], step: float) -> tuple[str, ...]:
    """The texts of equally spaced ticks, all with the same unit and the same number of decimals."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 1e15 or 0 < largest < 1e-3:
        return tuple("0" if tick == 0 else _power(tick) for tick in ticks)
    unit, letter = next(((unit, name) for unit, name in _UNITS if largest >= max(unit, 10_000)), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return tuple("0" if tick == 0 else f"{tick / unit:.{decimals}f}{letter}" for tick in ticks)


def number(value: float) -> str:
    """A number with four digits, as it stands in tables: `12,345`, `0.7312`, `3e-5`."""
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return _power(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _power(value: float) -> str:
    """`2.5e-5`."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
