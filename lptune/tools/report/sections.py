"""The parts of the page below its head: values of charts, shadow check, samples, plan, config."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lptune.tools.report import shadow as shadow_checks
from lptune.tools.report import svg
from lptune.tools.report.axes import number
from lptune.tools.report.charts import Chart
from lptune.tools.report.markup import Html, scrolled, tag
from lptune.tools.report.plan import COLUMNS, Plan
from lptune.tools.report.run import Run, Sample
from lptune.tools.report.summary import (
    differing_keys,
    duration,
    percent,
)

MAX_SAMPLES = 20
MAX_KEY_COLUMNS = 8
_MAX_ROWS = 400
_NUM_VALUES = 13


def legend(runs: Sequence[Run], names: Sequence[str]) -> Html:
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


def compile_time(run: Run) -> list[str]:
    """What stands beside the tokens per second, from which the time of compilation is left out."""
    steps_N, seconds_N = run.rows["compile_time_s"].finite
    total_s = float(seconds_N[seconds_N > 0].sum())
    if not 0 < total_s < 1e9:
        return []
    steps = [f"{step:,}" for step in steps_N[seconds_N > 0]]
    where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
    return [f"{duration(total_s)} of it in {where}"]


def values_table(chart: Chart, runs: Sequence[Run], names: Sequence[str]) -> Html:
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
    heads = [names[series.run] for series in chart.series] if len(runs) > 1 else [chart.metric.title]
    head = tag(
        "tr", tag("th", "step", scope="col"), (tag("th", each, scope="col", klass="num") for each in heads)
    )
    table = tag("table", tag("thead", head), tag("tbody", rows))
    return tag(
        "details", tag("summary", "Values"), scrolled(table, f"Values: {chart.metric.title}"), klass="values"
    )


def _row(head: str, cells: Sequence[str]) -> Html:
    return tag("tr", tag("th", head, scope="row"), (tag("td", cell, klass="num") for cell in cells))


def shadow(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
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
        found += [tag("h3", name) if len(runs) > 1 else None, tag("p", text, klass="soft"), _groups(run)]
    return tag("section", tag("h2", "Low precision against high, by layer"), *found) if found else None


def _groups(run: Run) -> Html:
    groups = run.shadow.groups()
    lowest = min((db for group in groups for _, db in group.sqnr_by_block), default=0.0)
    highest = max((db for group in groups for _, db in group.sqnr_by_block), default=0.0)
    heads = ["Layers", "by block", *(f"worst {text}" for text in shadow_checks.MEASURES.values())]
    rows = []
    for group in groups[:_MAX_ROWS]:
        cells = [tag("td", _worst(group, measure), klass="num") for measure in shadow_checks.MEASURES]
        bars = tag("td", _bars(group, lowest, highest))
        rows.append(tag("tr", tag("th", tag("code", group.name), scope="row"), bars, cells))
    head = tag(
        "tr", (tag("th", text, scope="col", klass="num" if i > 1 else "") for i, text in enumerate(heads))
    )
    about = (
        " stands for the number of the block, which follows the worst value in brackets. Bars: gradient SQNR "
        f"of each block, from {lowest:.1f} to {highest:.1f} dB; the lowest of each row is marked."
    )
    table = tag("table", tag("thead", head), tag("tbody", rows))
    return tag(
        "div", scrolled(table, "Shadow check by layer"), tag("p", tag("code", "#"), about, klass="soft")
    )


def _worst(group: shadow_checks.Group, measure: str) -> str:
    if measure not in group.worst:
        return ""
    worst, block = group.worst[measure]
    is_share = measure in shadow_checks.LARGE_IS_BAD
    text = percent(worst) if is_share else f"{worst:.1f}" if measure.endswith("_db") else f"{worst:.5f}"
    is_one_of_many = block and len(group.sqnr_by_block) > 1 and not (is_share and worst == 0)
    return f"{text} ({block})" if is_one_of_many else text


def _bars(group: shadow_checks.Group, lowest: float, highest: float) -> Html | None:
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


def samples(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """Answers of the model before training and at the end, side by side."""
    found = []
    for run, name in zip(runs, names, strict=True):
        if run.samples:
            by_prompt = dict[str, list[Sample]]()
            for sample in sorted(run.samples, key=lambda sample: sample.step):
                by_prompt.setdefault(sample.prompt, []).append(sample)
            shown = [_sample(each) for each in list(by_prompt.values())[:MAX_SAMPLES]]
            left = len(by_prompt) - len(shown)
            more = tag("p", f"{left:,} more are in samples.jsonl.", klass="soft") if left else None
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


def plans(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
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
        table = _plan_table(plan)
        found.append(tag("details", tag("summary", about), table, klass="block", open=len(runs) == 1))
    return tag("section", tag("h2", "Precision plan"), *found)


def _plan_table(plan: Plan) -> Html:
    rows = plan.rows()
    head = tag("tr", (tag("th", text, scope="col") for text in COLUMNS))
    body = [
        tag(
            "tr",
            tag("th", tag("code", row[0]), scope="row"),
            (tag("td", cell, klass="same" if cell == "high" else "") for cell in row[1:]),
        )
        for row in rows[:_MAX_ROWS]
    ]
    more = (
        f"{len(rows) - _MAX_ROWS:,} more rows are in precision_plan.json." if len(rows) > _MAX_ROWS else None
    )
    table = scrolled(tag("table", tag("thead", head), tag("tbody", body)), "Precision plan")
    return tag("div", table, tag("p", more, klass="soft") if more else None)


def configs(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    """The keys that differ, and each config.yaml as it stands."""
    if not any(run.config_text for run in runs):
        return None
    keys = differing_keys([run.config for run in runs]) if len(runs) > 1 else {}
    found: list[Html | None] = []
    if keys:
        head = tag("tr", tag("th", "key", scope="col"), (tag("th", name, scope="col") for name in names))
        body = [
            tag("tr", tag("th", tag("code", key), scope="row"), (tag("td", text) for text in texts))
            for key, texts in list(keys.items())[:_MAX_ROWS]
        ]
        found.append(scrolled(tag("table", tag("thead", head), tag("tbody", body)), "Keys that differ"))
    elif len(runs) > 1:
        found.append(tag("p", "The configs have the same keys and values.", klass="soft"))
    for run, name in zip(runs, names, strict=True):
        if run.config_text:
            title = "config.yaml" if len(runs) == 1 else f"config.yaml of {name}"
            text = tag("pre", run.config_text, tabindex="0")
            found.append(tag("details", tag("summary", title), text))
    return tag("section", tag("h2", "Configuration"), *found)
