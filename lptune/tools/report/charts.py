"""Which charts a report has, and what each shows.

A chart is data: series of points, axes and words. svg.py draws it for the page, png.py with matplotlib.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.tools.report.axes import Axis, linear, logarithmic, needs_log
from lptune.tools.report.rows import Column
from lptune.tools.report.run import Run
from lptune.tools.report.thin import is_thinned, means, thin


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
    runs: Sequence[Run], labels: Sequence[str], reference: int | None = None
) -> tuple[list[Chart], list[Chart], list[str]]:
    """The charts that stand first, the others, and the names of metrics for which there was no room.

    labels: the name of each run. reference: the number of the run from which differences are drawn.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.rows.columns))
    unknown = [name for name in names if name not in MAIN and name not in OTHERS and name not in _UNSHOWN]
    unknown.sort(key=lambda name: not name.startswith("eval_loss/"))
    last = max(run.rows.last_step for run in runs)
    main, others = (
        [_chart(name, metric_of(name), [run.rows[name] for run in runs], labels, last) for name in group]
        for group in (MAIN, [*OTHERS, *unknown[:MAX_MORE]])
    )
    if reference is not None and len(runs) > 1:
        others[:0] = [
            _difference(name, title, runs, labels, reference) for name, title in DIFFERENCES.items()
        ]
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
    name: str, title: str, runs: Sequence[Run], labels: Sequence[str], reference: int
) -> Chart | None:
    """The chart of a metric minus that of the reference run, at the steps that both have."""
    base = runs[reference].rows[name].finite
    columns = []
    for run in runs:
        column = run.rows[name].finite
        steps_N, ours_N, base_N = np.intersect1d(column.steps_N, base.steps_N, return_indices=True)
        difference_N = column.values_N[ours_N] - base.values_N[base_N]
        found = Column(steps_N, difference_N)
        if metric_of(name).is_noisy and len(steps_N) > _MANY:
            # Two noisy curves minus each other are noise; their means tell whether they part.
            found, title = means(found), f"{DIFFERENCES[name]} (means)"
        columns.append(found)
    if not any(len(column.steps_N) for number, column in enumerate(columns) if number != reference):
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
