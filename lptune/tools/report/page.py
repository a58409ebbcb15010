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

import numpy as np
import numpy.typing as npt

import lptune
from lptune.base.files import write_errors, write_text
from lptune.tools.report import seeds, svg
from lptune.tools.report.charts import NUM_COLUMNS, NUM_MEANS, Chart, charts, is_any_thinned, number
from lptune.tools.report.markup import Html, heads, soft, table, tag
from lptune.tools.report.run import COLUMNS, LARGE_IS_BAD, MEASURES, Facts, Group, Plan, Run, Sample
from lptune.tools.report.summary import (
    Summary,
    by_final_loss,
    differing_keys,
    duration,
    gib,
    labels,
    loss_text,
    percent,
    steps_text,
    summary,
    value,
)
from lptune.tools.report.svg import styles


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
    bases = None if place is None else seeds.paired(sorted_runs, sorted_runs[place])
    return Arranged(
        sorted_runs, sorted_names, styles(len(runs), place), place, *charts(sorted_runs, sorted_names, bases)
    )


def page(runs: Sequence[Run], reference: int | None = None) -> str:
    """The report of one or several runs as HTML, the lowest final held-out loss first.

    reference: as for `arrange`.
    """
    runs, names, looks, reference, main, others, left_out = arrange(runs, reference)
    numbers = [summary(run) for run in runs]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        _header(runs, names, numbers),
        _notes(runs, names),
        _tiles(runs[0], numbers[0]) if len(runs) == 1 else _summary(runs, names, numbers, reference),
        _by_seed(runs, reference),
        _charts(runs, names, main, others, left_out),
        _shadow(runs, names),
        _samples(runs, names),
        _plans(runs, names),
        _configs(runs, names),
        tag("footer", _how_it_was_drawn([*main, *others])),
        tag("script", _json([svg.LEFT, svg.WIDTH - svg.RIGHT, svg.TOP, svg.HEIGHT - svg.BOTTOM]),
            type="application/json", id="box"),
        tag("script", _json({chart.slug: _data(chart) for chart in [*main, *others]}),
            type="application/json", id="data"),
        tag("script", _asset("page.js")),
    ]  # fmt: skip
    style = Html(_asset("page.css") + _run_css(looks))
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(_asset('page.js'))}; "
    in_head = [
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"{policy}base-uri 'none'; form-action 'none'",
        ),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · lptune report"),
        tag("style", style),
    ]
    document = tag("html", tag("head", *in_head), tag("body", *body), lang="en")
    return f"<!doctype html>\n{document}\n"


def write_page(path: Path, runs: Sequence[Run], reference: int | None = None) -> None:
    """Writes the report of `runs` to `path` in one piece, by `page`. Raises UserError if it cannot be
    written.
    """
    with write_errors(f"{path}:", "choose another with --output"):
        write_text(path, page(runs, reference), shared=True)


def _charts(
    runs: Sequence[Run], names: Sequence[str], main: list[Chart], others: list[Chart], left_out: list[str]
) -> Html | None:
    if not main and not others:
        return soft("No step has been written yet.")
    more = f"Without a chart for want of room: {', '.join(left_out[:30])}." if left_out else ""
    return tag(
        "section",
        tag("h2", "Charts"),
        _legend(runs, names) if len(runs) > 1 else None,
        tag("div", (_figure(chart, runs, names) for chart in main), klass="charts main"),
        tag("div", (_figure(chart, runs, names) for chart in others), klass="charts"),
        soft(more),
    )


def _figure(chart: Chart, runs: Sequence[Run], names: Sequence[str]) -> Html:
    details = []
    if chart.y.is_log:
        details.append("log scale")
    if chart.num_bad:
        details.append(f"× {chart.num_bad:,} not finite")
    if chart.name == "tokens_per_s" and len(runs) == 1:  # of several the summary says it
        details += _compile_time(runs[0])
    caption = [
        chart.metric.title,
        tag("span", f" · {' · '.join(details)}", klass="soft") if details else None,
    ]
    return tag(
        "figure",
        tag("figcaption", *caption),
        svg.draw(chart),
        tag("output", klass="readout", aria_live="polite"),
        _values_table(chart, runs, names),
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


def _how_it_was_drawn(all_charts: Sequence[Chart]) -> str:
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
    now = datetime.now(UTC)
    return f"{thinned}{means}Written by lptune {lptune.__version__} on {now:%Y-%m-%d at %H:%M:%S} UTC."


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


MAX_KEY_COLUMNS = 8
"""Keys that the table of runs shows; all stand below, under Configuration."""


def _header(runs: Sequence[Run], names: Sequence[str], numbers: Sequence[Summary]) -> Html:
    """The title and what all runs have in common: model, data, device, versions."""
    one = len(runs) == 1
    status = _status(runs[0]) if one else None
    shown = [_facts(run.facts, each) for run, each in zip(runs, numbers, strict=True)]
    facts = {}
    for name in shown[0]:
        texts = dict.fromkeys(each[name] for each in shown if each[name])
        if len(texts) == 1 or (one and texts):
            facts[name] = next(iter(texts))
        elif texts and name == "Versions":  # rarely differ, and matter when they do
            facts[name] = "; ".join(texts)
    if one:
        facts["Folder"] = str(runs[0].folder)
    return tag(
        "header",
        tag("p", "lptune report", klass="eyebrow"),
        tag("div", tag("h1", names[0] if one else f"{len(runs)} runs compared"), status, klass="title"),
        tag(
            "dl",
            (tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items()),
            klass="facts",
        ),
    )


def _facts(facts: Facts, numbers: Summary) -> dict[str, str]:
    ranks = f", {facts.num_ranks} ranks" if facts.num_ranks not in ("", "1") else ""
    digest = f" ({facts.data_digest})" if facts.data_digest else ""
    launches = f" in {facts.num_launches} launches" if facts.num_launches not in ("", "1") else ""
    return {
        "Model": facts.model,
        "Recipe": facts.recipe,
        "Precision": facts.precision,
        "Data": f"{facts.data}{digest}".strip(),
        "Device": f"{facts.device}{ranks}",
        "Versions": facts.versions,
        "First step": f"{numbers.started}{launches if numbers.started else ''}",
        "Last step": numbers.last_row,
        "Run id": facts.run_id,
    }


def _status(run: Run, before_step: str = ", step ") -> Html:
    return tag("span", steps_text(run, before_step), klass=f"status {run.status.word}")


def _notes(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """What could not be read, and what a reader must know first."""
    found = []
    for run, name in zip(runs, names, strict=True):
        prefix = f"{name}: " if len(runs) > 1 else ""
        found += [f"{prefix}{note}" for note in run.notes]
        found += [
            f"{prefix}step {step:,}: the shadow check switched {layer} to high precision"
            for step, layer in run.shadow.switched[:20]
        ]
    if not found:
        return None
    return tag(
        "aside", tag("ul", (tag("li", note) for note in found[:50])), klass="notes", aria_label="Notes"
    )


def _by_seed(runs: Sequence[Run], reference: int | None) -> Html | None:
    """The table of runs that differ in their seed alone, and the picture of its differences."""
    rows = seeds.compared(runs, None if reference is None else runs[reference])
    if all(row.n < 2 for row in rows):
        return None
    first, *body = seeds.cells(rows)
    label = "Runs that differ in their seed alone"
    drawn = svg.differences(rows) if any("difference" in row.measured for row in rows) else None
    return tag(
        "section",
        tag("h2", "By seed"),
        table(label, heads(first), (_row(name, texts) for name, *texts in body)),
        tag("figure", tag("figcaption", "Held-out loss minus that of the baseline"), drawn)
        if drawn
        else None,
    )


def _tiles(run: Run, numbers: Summary) -> Html:
    before = (
        f"before training {loss_text(numbers.first_eval_loss)}" if numbers.first_eval_loss is not None else ""
    )
    best = numbers.best_eval_loss
    if best is not None and numbers.eval_loss is not None and best < numbers.eval_loss:
        before += f"{', ' if before else ''}lowest {loss_text(best)}"
    tiles = [
        ("Held-out loss", loss_text(numbers.eval_loss), before),
        ("Loss", loss_text(numbers.loss), "mean of the last 5 % of steps"),
        ("Tokens per second", value(numbers.tokens_per_s), "median, without compilation"),
        ("Training", duration(numbers.train_time_s), _time_note(run, numbers)),
        ("Peak memory", gib(numbers.peak_memory_gib), "largest of any step, per rank"),
        ("In low precision", percent(numbers.low_fraction), "of the linear layers' FLOPs"),
        ("Skipped steps", f"{numbers.num_skipped:,}", "loss or gradient not finite"),
    ]
    return tag(
        "dl",
        (
            tag("div", tag("dt", name), tag("dd", main), tag("dd", small, klass="small") if small else None)
            for name, main, small in tiles
        ),
        klass="tiles",
    )


def _time_note(run: Run, numbers: Summary) -> str:
    """What stands below the time of training: how much is to come, or how long compilation took."""
    if numbers.rest_s is not None:
        return f"about {duration(numbers.rest_s)} to go"
    return (
        f"and {duration(numbers.compile_time_s)} of compilation"
        if numbers.compile_time_s
        else "no compilation"
    )


def _summary(
    runs: Sequence[Run], names: Sequence[str], numbers: Sequence[Summary], reference: int | None
) -> Html:
    """The table of several runs."""
    keys = differing_keys([run.config for run in runs])
    key_columns = list(keys)[:MAX_KEY_COLUMNS]
    bases = runs if reference is None else seeds.paired(runs, runs[reference])
    columns = {
        "Held-out loss": [loss_text(each.eval_loss) for each in numbers],
        "Against reference": [_difference(run, base) for run, base in zip(runs, bases, strict=True)],
        "Loss, last 5 %": [loss_text(each.loss) for each in numbers],
        "Tokens/s": [value(each.tokens_per_s) for each in numbers],
        "Training": [duration(each.train_time_s) for each in numbers],
        "Compilation": [duration(each.compile_time_s) if each.compile_time_s else "none" for each in numbers],
        "Memory": [gib(each.peak_memory_gib) for each in numbers],
        "Low precision": [percent(each.low_fraction) for each in numbers],
        "Skipped": [f"{each.num_skipped:,}" for each in numbers],
    }
    if reference is None:
        del columns["Against reference"]
    first = [name for name in columns if name in ("Held-out loss", "Against reference")]
    if set(columns["Compilation"]) == {"none"}:
        del columns["Compilation"]
    rows = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        of = " (reference)" if place == reference else None
        rows.append(
            tag(
                "tr",
                tag("th", svg.swatch(place), " ", name, of, tag("div", _status(run, " ")), scope="row"),
                (tag("td", columns[head][place], klass="num") for head in first),
                (tag("td", keys[key][place]) for key in key_columns),
                (
                    tag("td", cells[place], klass="num")
                    for head, cells in columns.items()
                    if head not in first
                ),
            )
        )
    top = [
        *heads(["Run"]),
        *heads(first, "num"),
        *heads(tag("code", key) for key in key_columns),
        *heads((text for text in columns if text not in first), "num"),
    ]
    left = len(keys) - len(key_columns)
    more = f"{left} more keys differ: see Configuration." if left else ""
    return tag("section", tag("h2", "Summary"), table("Summary of the runs", top, rows), soft(more))


def _difference(run: Run, base: Run) -> str:
    ours, theirs = run.final("eval_loss"), base.final("eval_loss")
    return "—" if run is base or ours is None or theirs is None else f"{ours - theirs:+.4f}"


MAX_SAMPLES = 20
_MAX_ROWS = 400
_NUM_VALUES = 13


def _legend(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The runs with their lines; a box hides a run in all charts."""
    return tag(
        "div",
        (
            tag(
                "label",
                tag("input", type="checkbox", checked=True, id=f"show-{place}"),
                svg.swatch(place),
                tag("span", name, data_name=True),
                for_=f"show-{place}",
            )
            for place, (_, name) in enumerate(zip(runs, names, strict=True))
        ),
        klass="legend",
        role="group",
        aria_label="Runs that the charts show",
    )


def _compile_time(run: Run) -> list[str]:
    """What stands beside the tokens per second, from which the time of compilation is left out."""
    steps_N, seconds_N = run.rows["compile_time_s"].finite
    total_s = float(seconds_N[seconds_N > 0].sum())
    if not 0 < total_s < 1e9:
        return []
    steps = [f"{step:,}" for step in steps_N[seconds_N > 0]]
    where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
    return [f"{duration(total_s)} of it in {where}"]


def _values_table(chart: Chart, runs: Sequence[Run], names: Sequence[str]) -> Html:
    """Values of a chart in a table: at steps across the range, and the extremes."""
    unit = " %" if chart.metric.as_percent else ""
    columns = [series.all for series in chart.series]
    steps_N = np.unique(np.concatenate([steps_N for steps_N, _ in columns]))
    chosen: npt.NDArray[np.int64] = np.linspace(0, len(steps_N) - 1, _NUM_VALUES).round().astype(np.int64)
    rows = []
    for step in np.unique(steps_N[chosen]).tolist():
        cells = []
        for each_N, values_N in columns:
            place = int(np.searchsorted(each_N, step))
            has_it = place < len(each_N) and each_N[place] == step
            cells.append(f"{number(float(values_N[place]))}{unit}" if has_it else "")
        rows.append(_row(f"{step:,}", cells))
    for name, choose in (("smallest", np.argmin), ("largest", np.argmax)):
        cells = []
        for each_N, values_N in columns:
            if len(values_N):
                place = int(choose(values_N))
                cells.append(f"{number(float(values_N[place]))}{unit} (step {each_N[place]:,})")
            else:
                cells.append("")
        rows.append(_row(name, cells))
    texts = [names[series.run] for series in chart.series] if len(runs) > 1 else [chart.metric.title]
    top = [*heads(["step"]), *heads(texts, "num")]
    values = table(f"Values: {chart.metric.title}", top, rows)
    return tag("details", tag("summary", "Values"), values, klass="values")


def _row(head: str, cells: Sequence[str]) -> Html:
    return tag("tr", tag("th", head, scope="row"), (tag("td", cell, klass="num") for cell in cells))


def _shadow(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """The last shadow check of each run, by groups of layers."""
    found = []
    for run, name in zip(runs, names, strict=True):
        if not run.shadow.checks:
            continue
        last = run.shadow.checks[-1]
        losses = (
            f"Loss {last.loss:.6g}, in high precision {last.shadow_loss:.6g}."
            if last.loss is not None and last.shadow_loss is not None
            else ""
        )
        text = f"Step {last.step:,}, the last of {len(run.shadow.checks):,} checks. {losses}"
        found += [tag("h3", name) if len(runs) > 1 else None, soft(text), _groups(run)]
    return tag("section", tag("h2", "Low precision against high, by layer"), *found) if found else None


def _groups(run: Run) -> Html:
    groups = run.shadow.groups()
    lowest = min((db for group in groups for _, db in group.sqnr_by_block), default=0.0)
    highest = max((db for group in groups for _, db in group.sqnr_by_block), default=0.0)
    rows = []
    for group in groups[:_MAX_ROWS]:
        cells = [tag("td", _worst(group, measure), klass="num") for measure in MEASURES]
        bars = tag("td", _bars(group, lowest, highest))
        rows.append(tag("tr", tag("th", tag("code", group.name), scope="row"), bars, cells))
    top = heads(["Layers", "by block"]) + heads((f"worst {text}" for text in MEASURES.values()), "num")
    about = (
        " stands for the number of the block, which follows the worst value in brackets. Bars: gradient SQNR "
        f"of each block, from {lowest:.1f} to {highest:.1f} dB; the lowest of each row is marked."
    )
    note = tag("p", tag("code", "#"), about, klass="soft")
    return tag("div", table("Shadow check by layer", top, rows), note)


def _worst(group: Group, measure: str) -> str:
    if measure not in group.worst:
        return ""
    worst, block = group.worst[measure]
    is_share = measure in LARGE_IS_BAD
    text = percent(worst) if is_share else f"{worst:.1f}" if measure.endswith("_db") else f"{worst:.5f}"
    is_one_of_many = block and len(group.sqnr_by_block) > 1 and not (is_share and worst == 0)
    return f"{text} ({block})" if is_one_of_many else text


def _bars(group: Group, lowest: float, highest: float) -> Html | None:
    blocks = group.sqnr_by_block[:400]
    if not blocks:
        return None
    width, worst = 160 / len(blocks), min(db for _, db in blocks)
    bars = []
    for place, (_, db) in enumerate(blocks):
        height = 4 + 22 * (db - lowest) / max(highest - lowest, 1e-9)
        x, y = f"{place * width:.2f}", f"{26 - height:.1f}"
        sizes = {"width": f"{max(width - 1, 0.5):.2f}", "height": f"{height:.1f}"}
        bars.append(tag("rect", klass="low" if db == worst else "", x=x, y=y, **sizes))
    text = ", ".join(f"{block}: {db:.1f} dB" for block, db in blocks[:100])
    return tag("svg", *bars, klass="bars", viewBox="0 0 160 26", role="img", aria_label=text)


def _samples(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """Answers of the model before training and at the end, side by side."""
    found = []
    for run, name in zip(runs, names, strict=True):
        if run.samples:
            by_prompt = dict[str, list[Sample]]()
            for sample in sorted(run.samples, key=lambda sample: sample.step):
                by_prompt.setdefault(sample.prompt, []).append(sample)
            shown = [_sample(each) for each in list(by_prompt.values())[:MAX_SAMPLES]]
            left = len(by_prompt) - len(shown)
            more = soft(f"{left:,} more are in samples.jsonl." if left else "")
            block = tag("div", *shown, klass="samples")
            if len(runs) == 1:
                found += [block, more]
            else:
                found.append(tag("details", tag("summary", name), block, more, klass="block"))
    return tag("section", tag("h2", "Samples"), *found) if found else None


def _sample(answers: Sequence[Sample]) -> Html:
    first, last = answers[0], answers[-1]
    texts = [("Prompt", first.prompt), (_when(first), first.answer)]
    if len(answers) > 1:
        texts.append((_when(last), last.answer))
    if first.reference:
        texts.append(("Reference", first.reference))
    return tag(
        "div",
        (tag("div", tag("h4", head), tag("p", text, klass="text", dir="auto")) for head, text in texts),
        klass="sample",
    )


def _when(sample: Sample) -> str:
    return f"Answer {sample.when}" if sample.when else f"Answer at step {sample.step:,}"


def _plans(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """The precision of each linear layer; runs with the same plan share a table."""
    by_plan = dict[Plan, list[str]]()
    for run, name in zip(runs, names, strict=True):
        if run.plan.layers:
            by_plan.setdefault(run.plan, []).append(name)
    if not by_plan:
        return None
    found = []
    for plan, of in by_plan.items():
        count = f"{plan.kind}: {plan.num_converted} of {len(plan.layers)} linear layers in low precision"
        about = f"{', '.join(of)} · {count}" if len(runs) > 1 else count
        layers = _plan_table(plan)
        found.append(tag("details", tag("summary", about), layers, klass="block", open=len(runs) == 1))
    return tag("section", tag("h2", "Precision plan"), *found)


def _plan_table(plan: Plan) -> Html:
    rows = plan.rows()
    body = [
        tag(
            "tr",
            tag("th", tag("code", row[0]), scope="row"),
            (tag("td", cell, klass="same" if cell == "high" else "") for cell in row[1:]),
        )
        for row in rows[:_MAX_ROWS]
    ]
    left = len(rows) - _MAX_ROWS
    more = f"{left:,} more rows are in precision_plan.json." if left > 0 else ""
    return tag("div", table("Precision plan", heads(COLUMNS), body), soft(more))


def _configs(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """The keys that differ, and each config.yaml as it stands."""
    if not any(run.config_text for run in runs):
        return None
    keys = differing_keys([run.config for run in runs]) if len(runs) > 1 else {}
    found: list[Html | None] = []
    if keys:
        body = [
            tag("tr", tag("th", tag("code", key), scope="row"), (tag("td", text) for text in texts))
            for key, texts in list(keys.items())[:_MAX_ROWS]
        ]
        found.append(table("Keys that differ", heads(["key", *names]), body))
    elif len(runs) > 1:
        found.append(soft("The configs have the same keys and values."))
    for run, name in zip(runs, names, strict=True):
        if run.config_text:
            title = "config.yaml" if len(runs) == 1 else f"config.yaml of {name}"
            text = tag("pre", run.config_text, tabindex="0")
            found.append(tag("details", tag("summary", title), text))
    return tag("section", tag("h2", "Configuration"), *found)
