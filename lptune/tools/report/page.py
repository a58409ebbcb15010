"""The page: one HTML file that needs nothing else and fetches nothing.

Its Content-Security-Policy forbids every request, and every script and style but the two that are named by
their digest. So even if markup of a stranger got into the page, it could neither run nor call home. What the
page shows stands in its HTML; the script adds a cursor (page.js).
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import lptune
from lptune.base.files import write_errors, write_text
from lptune.tools.report import head, sections, svg
from lptune.tools.report.charts import Chart, charts, is_any_thinned
from lptune.tools.report.markup import Html, tag
from lptune.tools.report.run import Run
from lptune.tools.report.summary import by_final_loss, labels, steps_text, summary
from lptune.tools.report.svg import styles
from lptune.tools.report.thin import NUM_COLUMNS, NUM_MEANS


class Arranged(NamedTuple):
    """Runs in the order of the page, with what tells them apart, and their charts."""

    runs: list[Run]
    names: list[str]
    looks: list[svg.Style]
    reference: int | None
    """The number of the reference run in this order."""
    main: list[Chart]
    others: list[Chart]
    left_out: list[str]
    """Metrics for which there was no room."""


def arrange(runs: Sequence[Run], reference: int | None = None) -> Arranged:
    """Sorts runs by their final held-out loss and makes their charts. reference: the number of the run that
    the others are compared with; of one run there is none.
    """
    order = by_final_loss(runs)
    names = labels([run.folder for run in runs])
    place = None if reference is None or len(runs) == 1 else order.index(reference)
    sorted_runs, sorted_names = [runs[each] for each in order], [names[each] for each in order]
    return Arranged(
        sorted_runs, sorted_names, styles(len(runs), place), place, *charts(sorted_runs, sorted_names, place)
    )


def page(runs: Sequence[Run], reference: int | None = None, refresh_s: int = 0) -> str:
    """The report of one or several runs as HTML, the lowest final held-out loss first.

    reference: as for `arrange`. refresh_s: the page loads itself again after so many seconds; 0: never.
    """
    runs, names, looks, reference, main, others, left_out = arrange(runs, reference)
    numbers = [summary(run) for run in runs]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        head.header(runs, names, numbers),
        head.notes(runs, names),
        head.summary(runs, names, numbers, reference),
        _charts(runs, names, main, others, left_out),
        sections.shadow(runs, names),
        sections.samples(runs, names),
        sections.plans(runs, names),
        sections.configs(runs, names),
        tag("footer", _how_it_was_drawn([*main, *others], refresh_s)),
        tag("script", _json([svg.LEFT, svg.WIDTH - svg.RIGHT, svg.TOP, svg.HEIGHT - svg.BOTTOM]),
            type="application/json", id="box"),
        tag("script", _json({chart.slug: _data(chart) for chart in [*main, *others]}),
            type="application/json", id="data"),
        tag("script", _asset("page.js")),
    ]  # fmt: skip
    style = Html(_asset("page.css") + _run_css(looks))
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(_asset('page.js'))}; "
    refresh = (
        tag("noscript", tag("meta", http_equiv="refresh", content=str(refresh_s))) if refresh_s else None
    )
    status = f"{steps_text(runs[0])} · " if len(runs) == 1 and refresh_s else ""
    in_head = [
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"{policy}base-uri 'none'; form-action 'none'",
        ),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        refresh,
        tag("title", f"{status}{title} · lptune report"),
        tag("style", style),
    ]
    document = tag("html", tag("head", *in_head), tag("body", *body, data_refresh=str(refresh_s)), lang="en")
    return f"<!doctype html>\n{document}\n"


def write_page(path: Path, runs: Sequence[Run], reference: int | None = None, refresh_s: int = 0) -> None:
    """Writes the report of `runs` to `path` in one piece, by `page`. Raises UserError if it cannot be
    written.
    """
    with write_errors(f"{path}:", "choose another with --output"):
        write_text(path, page(runs, reference, refresh_s), shared=True)


def _charts(
    runs: Sequence[Run], names: Sequence[str], main: list[Chart], others: list[Chart], left_out: list[str]
) -> Html | None:
    if not main and not others:
        return tag("p", "No step has been written yet.", klass="soft")
    more = f"Without a chart for want of room: {', '.join(left_out[:30])}." if left_out else None
    return tag(
        "section",
        tag("h2", "Charts"),
        sections.legend(runs, names) if len(runs) > 1 else None,
        tag("div", (_figure(chart, runs, names) for chart in main), klass="charts main"),
        tag("div", (_figure(chart, runs, names) for chart in others), klass="charts"),
        tag("p", more, klass="soft") if more else None,
    )


def _figure(chart: Chart, runs: Sequence[Run], names: Sequence[str]) -> Html:
    details = []
    if chart.y.is_log:
        details.append("log scale")
    if chart.num_bad:
        details.append(f"× {chart.num_bad:,} not finite")
    if chart.name == "tokens_per_s" and len(runs) == 1:  # of several the summary says it
        details += sections.compile_time(runs[0])
    caption = [
        chart.metric.title,
        tag("span", f" · {' · '.join(details)}", klass="soft") if details else None,
    ]
    return tag(
        "figure",
        tag("figcaption", *caption),
        svg.draw(chart),
        tag("output", klass="readout", aria_live="polite"),
        sections.values_table(chart, runs, names),
        id=f"chart-{chart.slug}",
    )


def _data(chart: Chart) -> dict[str, object]:
    """What the cursor reads: numbers only. Steps are differences, which are shorter."""
    runs = []
    for series in chart.series:
        steps, values = series.points.steps_N.tolist(), series.points.values_N.tolist()
        deltas = [step - before for step, before in zip(steps, [0, *steps], strict=False)]
        runs.append([series.run, deltas, [float(f"{value:.5g}") for value in values]])
    return {"x": [chart.x.low, chart.x.high], "unit": " %" if chart.metric.as_percent else "", "runs": runs}


def _how_it_was_drawn(all_charts: Sequence[Chart], refresh_s: int) -> str:
    thinned = (
        f"Where a run has more than {2 * NUM_COLUMNS} values, a chart shows the smallest and the largest of "
        f"each of {NUM_COLUMNS} columns of steps, so every peak is there. "
        if is_any_thinned(all_charts)
        else ""
    )
    has_means = any(series.mean is not None for chart in all_charts for series in chart.series)
    means = (
        f"Bold lines are means of up to {NUM_MEANS} equal ranges of steps; faint lines show the values. "
        * has_means
    )
    again = f" It loads itself again every {refresh_s} s." if refresh_s else ""
    now = datetime.now(UTC)
    return f"{thinned}{means}Written by lptune {lptune.__version__} on {now:%Y-%m-%d at %H:%M:%S} UTC.{again}"


def _run_css(looks: Sequence[svg.Style]) -> str:
    dark = svg.run_css([look._replace(dash="") for look in looks], svg.COLOURS_DARK, svg.NEUTRAL_DARK)
    # `:has` hides a run whose box is not ticked, also without JavaScript.
    hidden = "\n".join(
        f"body:has(#show-{run}:not(:checked)) figure .r{run}{{display:none}}" for run in range(len(looks))
    )
    light = svg.run_css(looks, svg.COLOURS, svg.NEUTRAL)
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n{hidden}\n"


@cache
def _asset(name: str) -> Html:
    return Html(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _digest(text: str) -> str:
    """As a Content-Security-Policy names a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: object) -> Html:
    """JSON that cannot end the <script> around it."""
    return Html(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
