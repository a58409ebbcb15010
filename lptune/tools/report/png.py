"""The charts as PNG files, drawn by matplotlib from the same points, axes and styles as the page's SVG.

matplotlib is an extra (`plot`), since nothing else needs it. It brings its own fonts and needs no display,
where a converter of SVG would draw text with whatever fonts the machine has, or none on a server.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lptune.base.errors import UserError, how_to_install
from lptune.base.files import write_bytes
from lptune.tools.report.charts import Chart
from lptune.tools.report.markup import shown
from lptune.tools.report.rows import Column
from lptune.tools.report.svg import COLOURS, NEUTRAL, Style, dash_lengths, has_dots

_INCHES, _DPI = (6.4, 3.6), 160


def check_installed() -> None:
    """Raises UserError if matplotlib is not installed."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--png: matplotlib is not installed; {how_to_install('plot')}; --svg needs nothing")


def write_png(path: Path, chart: Chart, labels: Sequence[str], looks: Sequence[Style]) -> None:
    """Writes `chart` to `path`. labels, looks: of each run. Raises OSError if it cannot be written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Names of runs are no formulas, and no style file of the user's changes the picture.
    with mpl.rc_context(
        {**mpl.rcParamsDefault, "text.parse_math": False, "font.size": 9, "savefig.bbox": None}
    ):
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("step")
        for series in chart.series:
            look = looks[series.run]
            colour = NEUTRAL if look.colour is None else COLOURS[look.colour]
            points = series.points
            line: dict[str, Any] = {"color": colour, "linewidth": 1.4, "label": shown(labels[series.run], 60)}
            lengths = dash_lengths(look)
            if lengths:
                line |= {"linestyle": (0, lengths), "dash_capstyle": "butt"}
            if series.mean is not None:
                axes.plot(*points, color=colour, linewidth=0.7, alpha=0.35, clip_on=False)
                points = series.mean
            else:
                points = _with_breaks(points, series.breaks_N)
            axes.plot(
                *points,
                marker="o" if has_dots(series, chart) else None,
                markersize=4,
                clip_on=False,
                **line,
            )
        if chart.y.is_log:
            axes.set_yscale("log")
        axes.set_xlim(chart.x.low, chart.x.high)
        axes.set_ylim(chart.y.low, chart.y.high)
        axes.set_xticks(chart.x.ticks, chart.x.labels)
        axes.set_yticks(chart.y.ticks, chart.y.labels)
        axes.minorticks_off()
        axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        if len(labels) > 1:
            axes.legend(frameon=False, fontsize=8, handlelength=3.5)
        content = BytesIO()
        figure.savefig(content, format="png")
    write_bytes(path, content.getvalue(), shared=True)


def _with_breaks(points: Column, breaks_N: npt.NDArray[np.int64]) -> Column:
    """The points with a NaN, which ends a line, at each break."""
    steps_N, values_N = points
    steps = np.concatenate([steps_N, breaks_N])
    values = np.concatenate([values_N, np.full(len(breaks_N), np.nan)])
    order = np.argsort(steps, kind="stable")
    return Column(steps[order], values[order])
