"""A chart as SVG, drawn here, so that the page needs no library and shows without JavaScript.

The drawing is 440 units wide and is scaled to its place, 340 to 620 pixels; lines keep their width and the
style sheet keeps the size of the text. A run has a colour and a dash pattern, so runs can be told apart by
either. Where a run has many noisy steps there are two lines: a faint one through the smallest and the largest
value of each pixel column, and a mean through it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.tools.report.charts import Axis, Chart, Series, linear
from lptune.tools.report.markup import Html, shown, tag
from lptune.tools.report.seeds import Row

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 28
_FEW = 60
"""Points of all lines of a chart, up to which each is marked."""

COLOURS = ("#1382d6", "#6a2f0b", "#d4498c", "#5f1d70", "#116c44", "#927534")
"""Of the runs on white, with a contrast of at least 4. Any two are 20 or more apart in CIELAB for normal
vision, and for eyes without red, green or blue cones; tests/tools/report/test_charts.py has the model."""
COLOURS_DARK = ("#33a7fc", "#e87b43", "#df82ad", "#f5bbfe", "#92eab1", "#d8b20f")
"""The same in dark mode, with a contrast of at least 6."""
NEUTRAL, NEUTRAL_DARK = "#6a6f78", "#a3a8b1"
"""Of the reference run."""
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "13 4", "5 2 1 2 1 2", "4 4")


class Style(NamedTuple):
    """How a run is drawn."""

    colour: int | None
    """Number of a colour; None: neutral."""
    dash: str


def styles(num_runs: int, reference: int | None) -> list[Style]:
    """A style for each run: one colour and dash pattern each, and the reference neutral and without dashes.
    They repeat after 42 runs, or after 36 beside a reference.
    """
    found, number = list[Style](), 0
    for run in range(num_runs):
        if run == reference:
            found.append(Style(None, ""))
            continue
        # The reference has the line without dashes.
        dashes = DASHES if reference is None else DASHES[1:]
        num_rounds, colour = divmod(number, len(COLOURS))
        found.append(Style(colour, dashes[(colour + num_rounds) % len(dashes)]))
        number += 1
    return found


def draw(chart: Chart) -> Html:
    """The chart as an <svg> element, to be styled by the page."""
    return tag(
        "svg",
        *_frame(chart),
        (_run(series, chart) for series in chart.series),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=describe(chart),
    )


def has_dots(series: Series, chart: Chart) -> bool:
    """Whether each point of a run is marked: where there are few, or only one, which has no line."""
    num_points = len(series.points.steps_N)
    return num_points == 1 or num_points * len(chart.series) <= _FEW


def describe(chart: Chart) -> str:
    """The chart in a sentence, for those who do not see it."""
    parts = []
    for series in chart.series:
        steps_N, values_N = series.points
        if len(values_N):
            parts.append(
                f"{shown(series.label, 60)}: {values_N[0]:.4g} at step {steps_N[0]}, "
                f"{values_N[-1]:.4g} at step {steps_N[-1]}, between {values_N.min():.4g} and "
                f"{values_N.max():.4g}"
            )
    return f"{chart.metric.title} by step. {'; '.join(parts)}."


def swatch(run: int) -> Html:
    """A short line in the style of a run, for legends."""
    line = tag("path", klass="line", d="M1 6h34")
    return tag(
        "svg", tag("g", line, klass=f"run r{run}"), klass="swatch", viewBox="0 0 36 12", aria_hidden="true"
    )


def standalone(chart: Chart, labels: Sequence[str], looks: Sequence[Style]) -> str:
    """The chart as an SVG file of its own, with title and legend, on white."""
    rows = [(series.run, labels[series.run]) for series in chart.series] if len(labels) > 1 else []
    top = 30 + 16 * len(rows)
    legend = [
        tag(
            "g",
            tag("g", tag("path", klass="line", d="M0 0h30"), klass=f"run r{run}"),
            tag("text", shown(label, 60), x=38, y=4),
            transform=f"translate({LEFT} {36 + 16 * row})",
        )
        for row, (run, label) in enumerate(rows)
    ]
    drawing = tag("g", *_frame(chart), (_run(series, chart) for series in chart.series),
                  transform=f"translate(0 {top})")  # fmt: skip
    height = HEIGHT + top
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tag(
        "svg",
        tag("style", Html(_STANDALONE + run_css(looks, COLOURS, NEUTRAL))),
        tag("rect", width=WIDTH, height=height, fill="#fff"),
        tag("text", chart.title, x=LEFT, y=20, klass="title"),
        legend,
        drawing,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=2 * WIDTH,
        height=2 * height,
    )


_NAME = 52
"""Letters of a row's name beside its interval."""


def differences(rows: Sequence[Row]) -> Html:
    """The differences of rows from their baseline, each with its interval, beside a line at 0: an <svg>
    element for the page, and as it stands also a file, for it brings its colours for white.
    """
    found = {row.name: row.measured["difference"] for row in rows if "difference" in row.measured}
    ends = {name: (each.mean, each.interval or 0.0) for name, each in found.items()}
    lows, highs = ([mean + side * half for mean, half in ends.values()] for side in (-1, 1))
    axis = linear(min(0.0, *lows, 0.0), max(0.0, *highs, 0.0))
    names = [shown(name, _NAME) for name in ends]
    left, line, bottom = 16 + 6 * max(map(len, names), default=0), 20, TOP + 20 * len(ends)
    plot = WIDTH // 2

    def x(value: float) -> str:
        return f"{left + float(axis.place(np.array(value))) * (plot - RIGHT):.1f}"

    grid = "".join(f"M{x(tick)} {TOP}V{bottom}" for tick in axis.ticks)
    every = -(-len(axis.ticks) // 4)  # labels that have room, that of 0 among them
    first = int(np.argmin(np.abs(axis.ticks))) % every
    texts = list(zip(axis.labels, map(x, axis.ticks), strict=True))[first::every]
    drawn = [
        tag("rect", klass="paper", width=left + plot, height=bottom + BOTTOM, fill="#fff"),
        tag("path", klass="grid", d=grid, stroke="#e4e6ea"),
        tag("path", klass="base", d=f"M{x(0.0)} {TOP}V{bottom}", stroke="#9aa0a8"),
        *(tag("text", text, x=at, y=bottom + 17, text_anchor="middle") for text, at in texts),
    ]
    for number, (name, (mean, half)) in enumerate(zip(names, ends.values(), strict=True)):
        y = TOP + line // 2 + line * number
        interval = tag(
            "path", klass="interval", d=f"M{x(mean - half)} {y}H{x(mean + half)}", stroke=COLOURS[0]
        )
        dot = tag("circle", klass="interval", cx=x(mean), cy=y, r=3, fill=COLOURS[0])
        drawn += [interval, dot, tag("text", name, x=left - 8, y=y + 4, text_anchor="end")]
    said = "; ".join(f"{name}: {mean:+.4g} ± {half:.4g}" for name, (mean, half) in ends.items())
    looks = {
        "font-family": "sans-serif",
        "font-size": "11",
        "viewBox": f"0 0 {left + plot} {bottom + BOTTOM}",
    }
    return tag("svg", *drawn, xmlns="http://www.w3.org/2000/svg", **looks, role="img", aria_label=said)


def run_css(looks: Sequence[Style], colours: Sequence[str], neutral: str) -> str:
    """The rules that give each run its colour and dashes."""
    rules = []
    for run, style in enumerate(looks):
        colour = neutral if style.colour is None else colours[style.colour]
        rules.append(f".r{run} path{{stroke:{colour}}}")
        if style.dash:
            rules.append(f".r{run} .line{{stroke-dasharray:{style.dash}}}")
    return "\n".join(rules)


_STANDALONE = """
text{font:11px system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#454b54}
.title{font-size:13px;font-weight:600;fill:#16191d}
.y text{text-anchor:end}.x text{text-anchor:middle}
.grid{stroke:#e4e6ea;fill:none}.base{stroke:#9aa0a8;fill:none}
.run path{fill:none;stroke-width:1.5;stroke-linejoin:round}.run .faint{stroke-opacity:.35;stroke-width:1}
.run .dots{stroke-width:5;stroke-linecap:round}.run .bad{stroke:#b3261e}
"""


def _frame(chart: Chart) -> list[Html]:
    """Grid, base line and ticks."""
    ys = _y(chart.y, np.array(chart.y.ticks))
    xs = _x(chart.x, np.array(chart.x.ticks))
    grid = "".join(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}" for y in ys)
    bottom = HEIGHT - BOTTOM
    marks = "".join(f"M{x:.1f} {bottom}v4" for x in xs)
    y_texts = (
        tag("text", label, x=LEFT - 7, y=f"{y + 4:.1f}") for label, y in zip(chart.y.labels, ys, strict=True)
    )
    x_texts = (
        tag("text", label, x=f"{x:.1f}", y=bottom + 17) for label, x in zip(chart.x.labels, xs, strict=True)
    )
    return [
        tag("path", klass="grid", d=grid),
        tag("path", klass="base", d=f"M{LEFT} {bottom}H{WIDTH - RIGHT}{marks}"),
        tag("g", *y_texts, tag("text", "step", x=LEFT - 16, y=bottom + 17), klass="y"),
        tag("g", *x_texts, klass="x"),
    ]


def _run(series: Series, chart: Chart) -> Html:
    steps_N, values_N = series.points
    x_N, y_N = _x(chart.x, steps_N.astype(float)), _y(chart.y, values_N)
    line = _path(x_N, y_N, np.searchsorted(series.breaks_N, steps_N))
    drawn = [tag("path", klass="line" if series.mean is None else "faint", d=line)]
    if series.mean is not None:
        mean_x_N, mean_y_N = _x(chart.x, series.mean.steps_N.astype(float)), _y(chart.y, series.mean.values_N)
        drawn.append(tag("path", klass="line", d=_path(mean_x_N, mean_y_N)))
    if has_dots(series, chart):
        # A point is a line of no length with round ends: it keeps its size when the drawing is scaled.
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(x_N, y_N, strict=True))
        drawn.append(tag("path", klass="dots", d=dots))
    if len(series.breaks_N):
        places = np.unique(np.round(_x(chart.x, series.breaks_N.astype(float)), 0))
        crosses = "".join(f"M{x - 3:.0f} {TOP - 8}l6 6m0-6l-6 6" for x in places)
        drawn.append(tag("path", klass="bad", d=crosses))
    return tag("g", *drawn, klass=f"run r{series.run}")


def _path(
    x_N: npt.NDArray[np.float64], y_N: npt.NDArray[np.float64], part_N: npt.NDArray[np.int64] | None = None
) -> str:
    """Lines through points. part_N: a number that changes where no line is to be drawn."""
    pieces = list[str]()
    parts = [0] * len(x_N) if part_N is None else part_N.tolist()
    last = None
    for x, y, part in zip(x_N.tolist(), y_N.tolist(), parts, strict=True):
        pieces.append(f"{'M' if part != last else 'L'}{x:.1f} {y:.1f}")
        last = part
    return "".join(pieces)


def _x(axis: Axis, values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return LEFT + axis.place(values_N) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return HEIGHT - BOTTOM - axis.place(values_N) * (HEIGHT - BOTTOM - TOP)
