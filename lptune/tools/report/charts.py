"""Which charts a report has, and what each shows: its points, its axes, its words.

A chart is data; svg.py draws it.

Points. A chart is a few hundred pixels wide, and a run may have a hundred thousand steps. Taking every n-th
point would drop most spikes, and a mean would flatten them. Here the steps are divided into as many columns
as the chart has pixels, and of each column the smallest and the largest value stay, at their own steps. On a
screen that is the same picture as all points, for a line between points of one column covers the column from
its smallest to its largest value in either case.

Axes. A tick stands at a number that people would choose: 1, 2 or 5 times a power of ten. A logarithmic axis
is taken where a linear one would press most of a curve into its lowest tenth, as the loss of the first steps
does.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.tools.report.rows import Column
from lptune.tools.report.run import Run

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


class Metric(NamedTuple):
    """How a metric is shown."""

    title: str
    from_zero: bool = False
    """Whether the axis begins at 0, so that heights compare."""
    as_percent: bool = False
    is_share: bool = False
    """Whether the axis ends at 100 %."""
    may_be_log: bool = False
    is_noisy: bool = False
    """Whether a mean is drawn through many points."""
    null_is_bad: bool = False
    """Whether null stands for a number that was not finite, not for one that is unknown."""
    is_count: bool = False


MAIN = {
    "loss": Metric("Loss", may_be_log=True, is_noisy=True, null_is_bad=True),
    "eval_loss": Metric("Held-out loss", may_be_log=True, null_is_bad=True),
}
"""The charts that stand first, and larger."""
OTHERS = {
    "lr": Metric("Learning rate", from_zero=True),
    "grad_norm": Metric("Gradient norm", may_be_log=True, is_noisy=True, null_is_bad=True),
    "tokens_per_s": Metric("Tokens per second, without compilation", from_zero=True, is_noisy=True),
    "peak_memory_gib": Metric("Peak memory (GiB)", from_zero=True),
    "low_precision_flops_fraction": Metric(
        "FLOPs in low precision", from_zero=True, as_percent=True, is_share=True
    ),
    "num_saturated": Metric("Tensors beyond their delayed scale", from_zero=True, is_count=True),
    "num_skipped": Metric("Skipped steps, in all", from_zero=True, is_count=True),
    "mfu": Metric("Model FLOPs utilization", from_zero=True, as_percent=True, is_noisy=True),
    "bf16_mfu": Metric("Utilization of the bfloat16 peak", from_zero=True, as_percent=True, is_noisy=True),
    "accuracy": Metric("Accuracy", from_zero=True, as_percent=True, is_share=True, is_noisy=True),
    "eval_accuracy": Metric("Held-out accuracy", from_zero=True, as_percent=True, is_share=True),
    "shadow_loss_difference": Metric("Loss minus that of the shadow check"),
    "shadow_worst_gradient_cosine": Metric("Shadow check: worst gradient cosine"),
    "shadow_worst_sqnr_db": Metric("Shadow check: worst gradient SQNR (dB)"),
    "shadow_worst_routing_agreement": Metric(
        "Shadow check: tokens with the same experts", as_percent=True, is_share=True
    ),
}
_UNSHOWN = {"num_tokens", "num_target_tokens", "step_time_s", "compile_time_s", "epoch"}
"""Metrics without a chart: the clock, and times that the tables sum up."""
_MANY = 150
"""Points from which on a mean is drawn through noisy ones."""
MAX_MORE = 16
"""Charts of metrics that this module does not know: held-out losses by source, rewards."""


DIFFERENCES = {
    "eval_loss": "Held-out loss minus that of the reference",
    "loss": "Loss minus that of the reference",
}
"""Metrics that are also shown as differences: at the scale of the whole run, curves lie on each other."""


class Series(NamedTuple):
    """One run in one chart."""

    run: int
    """Number of the run in the report."""
    label: str
    all: Column
    """All its numbers, in the unit of the chart."""
    points: Column
    """The points that are drawn."""
    mean: Column | None
    """A mean through many noisy points."""
    breaks_N: npt.NDArray[np.int64]
    """Steps whose value was not finite: no line crosses them."""


class Chart(NamedTuple):
    """One metric of all runs, ready to be drawn."""

    name: str
    """Of the metric, and unique among the charts."""
    metric: Metric
    series: tuple[Series, ...]
    x: Axis
    y: Axis

    @property
    def slug(self) -> str:
        """The name as a file or an element has it."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60] or "chart"

    @property
    def title(self) -> str:
        """The title, where no caption stands beside it."""
        return f"{self.metric.title} (log scale)" if self.y.is_log else self.metric.title

    @property
    def num_bad(self) -> int:
        """How many values of all runs were not finite."""
        return sum(len(series.breaks_N) for series in self.series)


def charts(
    runs: Sequence[Run], labels: Sequence[str], bases: Sequence[Run] | None = None
) -> tuple[list[Chart], list[Chart], list[str]]:
    """The charts that stand first, the others, and the names of metrics for which there was no room.

    labels: the name of each run. bases: for each run the one from which its difference is drawn.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.rows.columns))
    unknown = [name for name in names if name not in MAIN and name not in OTHERS and name not in _UNSHOWN]
    unknown.sort(key=lambda name: not name.startswith("eval_loss/"))
    last = max(run.rows.last_step for run in runs)
    main, others = (
        [_chart(name, metric_of(name), [run.rows[name] for run in runs], labels, last) for name in group]
        for group in (MAIN, [*OTHERS, *unknown[:MAX_MORE]])
    )
    if bases is not None:
        others[:0] = [_difference(name, title, runs, labels, bases) for name, title in DIFFERENCES.items()]
    return [chart for chart in main if chart], _with_unique_names(others), unknown[MAX_MORE:]


def _with_unique_names(found: Sequence[Chart | None]) -> list[Chart]:
    """The charts that there are. Two metrics may differ in characters that a file's name leaves out."""
    taken, unique = {*MAIN}, list[Chart]()
    for chart in found:
        if chart is not None:
            slug, number = chart.slug, 1
            while chart.slug in taken:
                number += 1
                chart = chart._replace(name=f"{slug[:50]}-{number}")
            taken.add(chart.slug)
            unique.append(chart)
    return unique


def metric_of(name: str) -> Metric:
    """How the metric `name` is shown."""
    known = MAIN.get(name) or OTHERS.get(name)
    if known:
        return known
    if name.startswith("eval_loss/"):
        source = name.removeprefix("eval_loss/")
        return Metric(f"Held-out loss of {source}", may_be_log=True, null_is_bad=True)
    return Metric(name, is_noisy=True)


def _difference(
    name: str, title: str, runs: Sequence[Run], labels: Sequence[str], bases: Sequence[Run]
) -> Chart | None:
    """The chart of a metric minus that of the run it is compared with, at the steps that both have."""
    columns = []
    for run, other in zip(runs, bases, strict=True):
        base = other.rows[name].finite
        column = run.rows[name].finite
        steps_N, ours_N, base_N = np.intersect1d(column.steps_N, base.steps_N, return_indices=True)
        difference_N = column.values_N[ours_N] - base.values_N[base_N]
        found = Column(steps_N, difference_N)
        if metric_of(name).is_noisy and len(steps_N) > _MANY:
            # Two noisy curves minus each other are noise; their means tell whether they part.
            found, title = means(found), f"{DIFFERENCES[name]} (means)"
        columns.append(found)
    if not any(
        len(column.steps_N) for run, base, column in zip(runs, bases, columns, strict=True) if run is not base
    ):
        return None
    last = max(run.rows.last_step for run in runs)
    return _chart(f"{name} difference", Metric(title), columns, labels, last)


def _chart(
    name: str, metric: Metric, columns: Sequence[Column], labels: Sequence[str], last: int
) -> Chart | None:
    """The chart of a column for each run, to the step `last`; None if none of them has a number."""
    series = []
    for number, (column, label) in enumerate(zip(columns, labels, strict=True)):
        bad_N = column.steps_N[np.isnan(column.values_N)] if metric.null_is_bad else column.steps_N[:0]
        if metric.as_percent:
            column = Column(column.steps_N, column.values_N * 100.0)
        column = column.finite
        if len(column.steps_N) or len(bad_N):
            has_mean = metric.is_noisy and len(column.steps_N) > _MANY
            mean = means(column) if has_mean else None
            series.append(Series(number, label, column, thin(column), mean, bad_N))
    values_N = np.concatenate([each.points.values_N for each in series] or [np.zeros(0)])
    if not len(values_N):
        return None
    firsts = [int(each.all.steps_N[0]) for each in series if len(each.all.steps_N)]
    x = linear(0 if min(firsts) < 0.1 * last else min(firsts), max(last, 1), pad=False)
    return Chart(name, metric, tuple(series), _only_whole(x), _y(metric, values_N))


def _only_whole(axis: Axis) -> Axis:
    """The axis without ticks at parts of a step."""
    if not any(tick != round(tick) for tick in axis.ticks):
        return axis
    whole = [round(tick) for tick in axis.ticks if abs(tick - round(tick)) < 1e-9]
    return axis._replace(ticks=tuple(map(float, whole)), labels=tuple(map(str, whole)))


def _y(metric: Metric, values_N: npt.NDArray[np.float64]) -> Axis:
    low, high = float(values_N.min()), float(values_N.max())
    if metric.may_be_log and needs_log(values_N):
        return logarithmic(low, high)
    if metric.from_zero and low >= 0:
        least = 100.0 if metric.is_share else 1.0 if metric.is_count else high
        axis = linear(0.0, max(high, least) or 1.0, pad=not metric.is_share)
        if metric.is_count:
            axis = _only_whole(axis)
        return axis._replace(labels=tuple(f"{text}%" for text in axis.labels)) if metric.as_percent else axis
    return linear(low, high)


def is_any_thinned(all_charts: Sequence[Chart]) -> bool:
    """Whether a chart leaves out points."""
    return any(is_thinned(len(series.all.steps_N)) for chart in all_charts for series in chart.series)
