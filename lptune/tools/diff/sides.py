"""What differs between two runs, and where their losses part.

Two runs whose losses should be equal and are not differ in a key, a version, the data, the precision of a
layer, or in chance. The report goes through them in that order. Then it names two steps: the first at which
the bits of the losses differ, which rounding alone explains, and the first at which the losses differ by more
than a thousandth, which points to a mistake.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lptune.base.text import group_name, table, without_number, wrapped
from lptune.tools.report.run import COLUMNS, Plan, Run, read_run
from lptune.tools.report.summary import NOT_COMPARED, differing_keys, loss_text, steps_text

TOLERANCE = 1e-3
"""The relative difference from which on losses have parted."""
_MAX_GROUPS = 40


class Side(NamedTuple):
    """One of the two: a run, or a config alone."""

    name: str
    config: Mapping[str, Any]
    """Dotted key -> value, of every key."""
    run: Run | None = None


def side_of_run(folder: Path) -> Side:
    """The run in `folder`. Raises UserError as `read_run` does."""
    run = read_run(folder)
    return Side(str(folder), run.config, run)


class Parted(NamedTuple):
    """The first step at which two losses differ."""

    step: int
    a: float
    b: float


def first_parted(a: Run, b: Run, name: str, tolerance: float) -> Parted | None:
    """The first step that both have at which the metric `name` differs by more than `tolerance` of the larger
    value; 0: at all, bit for bit. A number differs from none. None: no step does.
    """
    ours, theirs = a.rows[name], b.rows[name]
    steps_N, at_a_N, at_b_N = np.intersect1d(ours.steps_N, theirs.steps_N, return_indices=True)
    a_N, b_N = ours.values_N[at_a_N], theirs.values_N[at_b_N]
    differs_N = np.abs(a_N - b_N) > tolerance * np.maximum(np.abs(a_N), np.abs(b_N))
    differs_N |= np.isnan(a_N) != np.isnan(b_N)
    if not differs_N.any():
        return None
    place = int(np.argmax(differs_N))
    return Parted(int(steps_N[place]), float(a_N[place]), float(b_N[place]))


def lines(a: Side, b: Side, width: int) -> Iterator[str]:
    """The report as lines of at most `width` characters."""
    yield from _titles(a, b, width)
    yield ""
    yield from _config(a, b, width)
    if a.run is None or b.run is None:
        return
    yield from _facts(a.run, b.run, width)
    yield from _plans(a.run.plan, b.run.plan, width)
    yield from _losses(a.run, b.run)


def _titles(a: Side, b: Side, width: int) -> Iterator[str]:
    for letter, side in (("A", a), ("B", b)):
        status = f": {steps_text(side.run)}" if side.run else ""
        yield from wrapped(f"{letter}  {side.name}{status}", width, 0, 3, break_words=True)
        for note in side.run.notes if side.run else ():
            yield from wrapped(f"note: {note}", width, 3, 2, break_words=True)


def _config(a: Side, b: Side, width: int) -> Iterator[str]:
    missing = [letter for letter, side in (("A", a), ("B", b)) if not side.config]
    if missing:
        yield f"config: none that can be read in {' and '.join(missing)}"
        return
    keys = differing_keys([a.config, b.config])
    num_keys = len({*a.config, *b.config} - {*NOT_COMPARED})
    if not keys:
        yield f"config: the same {num_keys} keys ({' and '.join(NOT_COMPARED)} are not compared)"
        return
    yield f"config: {len(keys)} of {num_keys} keys differ"
    yield from _table([(key, texts[0], texts[1]) for key, texts in keys.items()], width)


def _facts(a: Run, b: Run, width: int) -> Iterator[str]:
    named = {
        "recipe": "recipe", "device": "device", "num_ranks": "ranks", "versions": "versions",
        "data_digest": "data (digest)",
    }  # fmt: skip
    pairs = {text: (getattr(a.facts, name), getattr(b.facts, name)) for name, text in named.items()}
    known = {text: pair for text, pair in pairs.items() if all(pair)}
    differing = {text: pair for text, pair in pairs.items() if pair[0] != pair[1]}
    same = [text for text, pair in known.items() if pair[0] == pair[1]]
    yield ""
    if differing:
        yield f"made with: {', '.join(differing)} differ{'s' if len(differing) == 1 else ''}"
        yield from _table(
            [(text, first or "—", second or "—") for text, (first, second) in differing.items()], width
        )
    if same:
        yield from wrapped(
            f"the same: {', '.join(f'{text} {known[text][0]}' for text in same)}",
            width,
            0,
            2,
            break_words=True,
        )
    if not known and not differing:
        yield "made with: neither run says"


def _plans(a: Plan, b: Plan, width: int) -> Iterator[str]:
    yield ""
    if not a.layers or not b.layers:
        which = [letter for letter, plan in (("A", a), ("B", b)) if not plan.layers]
        yield f"precision plan: none in {' and '.join(which)}"
        return
    # Without the note: why a layer stays high is no difference in what it computes.
    of_a, of_b = ({row[0]: row[1:-1] for row in plan.layers} for plan in (a, b))
    names = list(dict.fromkeys([*of_a, *of_b]))
    changes = dict[str, list[str]]()
    for name in names:
        if of_a.get(name) != of_b.get(name):
            changes.setdefault(_change(of_a.get(name), of_b.get(name)), []).append(name)
    num_differing = sum(map(len, changes.values()))
    if not changes:
        yield f"precision plan: the same for all {len(names):,} layers"
        return
    yield f"precision plan: {num_differing:,} of {len(names):,} layers differ (A -> B)"
    for change, layers in list(changes.items())[:_MAX_GROUPS]:
        yield from wrapped(change, width, 2, 2, break_words=True)
        groups = dict[str, list[str]]()
        for name in layers:
            groups.setdefault(without_number(name), []).append(name)
        for each in list(groups.values())[:_MAX_GROUPS]:
            yield from wrapped(group_name(each), width, 4, 2, break_words=True)


def _change(a: tuple[str, ...] | None, b: tuple[str, ...] | None) -> str:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    named = zip(COLUMNS[1:-1], a, b, strict=True)
    return ", ".join(f"{name} {old or 'none'} -> {new or 'none'}" for name, old, new in named if old != new)


def _losses(a: Run, b: Run) -> Iterator[str]:
    yield ""
    num_common = len(np.intersect1d(a.rows["loss"].steps_N, b.rows["loss"].steps_N))
    if not num_common:
        yield "losses: no step has a loss in both"
        return
    yield f"losses of the {num_common:,} steps that both have"
    yield f"  {'':<33}{'step':>9}{'A':>17}{'B':>17}"
    for text, tolerance in (
        ("first bits that differ", 0.0),
        (f"first difference above {TOLERANCE:g}", TOLERANCE),
    ):
        found = first_parted(a, b, "loss", tolerance)
        if found is None:
            yield f"  {text:<33}{'none':>9}"
        else:
            yield f"  {text:<33}{found.step:>9,}{found.a:>17.9g}{found.b:>17.9g}"
    for text, name in (("last loss", "loss"), ("last held-out loss", "eval_loss")):
        steps = [f"{run.rows[name].steps_N[-1]:,}" for run in (a, b) if len(run.rows[name].steps_N)]
        step = ", ".join(dict.fromkeys(steps))
        yield f"  {text:<33}{step:>9}{loss_text(a.final(name)):>17}{loss_text(b.final(name)):>17}"
    best = [run.rows["eval_loss"].finite.values_N for run in (a, b)]
    if all(map(len, best)):
        low_a, low_b = (loss_text(float(values_N.min())) for values_N in best)
        yield f"  {'lowest held-out loss':<33}{'':>9}{low_a:>17}{low_b:>17}"


def _table(rows: list[tuple[str, str, str]], width: int) -> Iterator[str]:
    """Rows of a name and two values, side by side where all of them fit, else below each other."""
    beside = table([("", "A", "B"), *rows], indent=2)
    if max(map(len, beside)) <= width:
        yield from beside
        return
    for name, a, b in rows:
        yield from wrapped(name, width, 2, 2, break_words=True)
        yield from wrapped(f"A  {a}", width, 4, 3, break_words=True)
        yield from wrapped(f"B  {b}", width, 4, 3, break_words=True)
