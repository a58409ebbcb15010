"""The head of the page: what the runs are, what to know first, and their numbers."""

from collections.abc import Sequence

from lptune.tools.report import svg
from lptune.tools.report.markup import Html, scrolled, tag
from lptune.tools.report.run import Facts, Run
from lptune.tools.report.summary import (
    Summary,
    differing_keys,
    duration,
    gib,
    loss_text,
    percent,
    steps_text,
    value,
)

MAX_KEY_COLUMNS = 8
"""Keys that the table of runs shows; all stand below, under Configuration."""


def header(runs: Sequence[Run], names: Sequence[str], numbers: Sequence[Summary]) -> Html:
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


def notes(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
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


def summary(
    runs: Sequence[Run], names: Sequence[str], numbers: Sequence[Summary], reference: int | None
) -> Html:
    """The tiles of one run, or the table of several."""
    if len(runs) == 1:
        return _tiles(runs[0], numbers[0])
    return tag("section", tag("h2", "Summary"), _table_of_runs(runs, names, numbers, reference))


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


def _table_of_runs(
    runs: Sequence[Run], names: Sequence[str], numbers: Sequence[Summary], reference: int | None
) -> Html:
    keys = differing_keys([run.config for run in runs])
    key_columns = list(keys)[:MAX_KEY_COLUMNS]
    columns = {
        "Held-out loss": [loss_text(each.eval_loss) for each in numbers],
        "Against reference": [_difference(numbers, place, reference) for place in range(len(runs))],
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
    heads = [
        tag("th", "Run", scope="col"),
        *(tag("th", text, scope="col", klass="num") for text in first),
        *(tag("th", tag("code", key), scope="col") for key in key_columns),
        *(tag("th", text, scope="col", klass="num") for text in columns if text not in first),
    ]
    left = len(keys) - len(key_columns)
    more = f"{left} more keys differ: see Configuration." if left else None
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows))
    return tag("div", scrolled(table, "Summary of the runs"), tag("p", more, klass="soft") if more else None)


def _difference(numbers: Sequence[Summary], place: int, reference: int | None) -> str:
    if reference is None or place == reference:
        return "—"
    ours, theirs = numbers[place].eval_loss, numbers[reference].eval_loss
    return "—" if ours is None or theirs is None else f"{ours - theirs:+.4f}"
