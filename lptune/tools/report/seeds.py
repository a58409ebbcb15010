"""Runs that differ in their seed alone as one row: the mean, its spread, and the difference from a baseline.

The seed decides which rows are held out and the order of the others, so the losses of two seeds differ, often
by more than those of two precisions. Two runs of one seed see the same rows, and that part is not in their
difference. So with L(s) and B(s), the losses of a run and of the baseline's run with seed s, n seeds,

    d(s) = L(s) - B(s),     mean(d) ± t · sd(d) / √n

t is the 97.5 % quantile of Student's distribution with n - 1 degrees of freedom: if the differences are
normal, 95 % of such intervals hold what many seeds would give. An interval without 0 tells the two apart.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lptune.base.text import duration_text
from lptune.tools.report.run import Run
from lptune.tools.report.summary import NOT_COMPARED, differing_keys, gib, percent, summary

# 1 to 9 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Spread(NamedTuple):
    """A measure over n seeds: mean, standard deviation, half the width of the mean's 95 % interval."""

    mean: float
    deviation: float | None
    interval: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value; one alone has no deviation and no interval."""
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Spread(mean, None, None, n)
    deviation, f = statistics.stdev(values), n - 1
    # Above the table: Abramowitz and Stegun, 26.7.5, within 0.001.
    t = _T_975[f - 1] if f < 10 else 1.95996 + 2.37227 / f + 2.82250 / f**2 + 2.55585 / f**3
    return Spread(mean, deviation, t * deviation / math.sqrt(n), n)


class Row(NamedTuple):
    """Runs that differ in their seed alone, in numbers."""

    name: str
    """The keys that tell the rows apart, with their values."""
    n: int
    measured: dict[str, Spread]
    """By the names of MEASURES; what no run has is left out."""
    is_base: bool = False
    note: str = ""
    runs: tuple[str, ...] = ()
    """Names of the folders of its runs."""


def compared(runs: Sequence[Run], reference: Run | None = None) -> list[Row]:
    """The rows of the runs that have finished, the lowest mean loss first. reference: one of the baseline."""
    members = _members([run for run in runs if run.status.word == "finished"])
    keys = differing_keys([{**next(iter(of.values())).config, "seed": 0} for of in members])
    base = next((of for of in members if any(run is reference for run in of.values())), {})
    rows = []
    for at, of in enumerate(members):
        values = defaultdict[str, list[float]](list)
        for seed, run in of.items():
            for name, value in _measures(run, base.get(seed)).items():
                values[name].append(value)
        pairs = [f"{key.rpartition('.')[2]}={texts[at]}" for key, texts in keys.items()]
        name = ", ".join(pair for pair in pairs if pair != "emulate=false")
        measured = {measure: spread(found) for measure, found in values.items()}
        folders = tuple(run.folder.name for run in of.values())
        rows.append(Row(name or "all", len(of), measured, of is base, runs=folders))
    return sorted(rows, key=lambda row: row.measured["loss"].mean if "loss" in row.measured else math.inf)


def paired(runs: Sequence[Run], reference: Run) -> list[Run]:
    """For each run the one from which its difference is taken: of the runs that differ from the reference in
    their seed alone that with the same seed; else the reference, which is one of `runs`.
    """
    base = next(of for of in _members(runs) if any(run is reference for run in of.values()))
    return [base.get(str(run.config.get("seed")), reference) for run in runs]


def _members(runs: Sequence[Run]) -> list[dict[str, Run]]:
    """The runs by seed, for each config without its seed. A run without a seed stands alone, and so does one
    that repeats another.
    """
    found = dict[str, dict[str, Run]]()
    for place, run in enumerate(runs):
        config = {key: value for key, value in run.config.items() if key not in (*NOT_COMPARED, "seed")}
        seed, key = str(run.config.get("seed")), repr(sorted(config.items()))
        if "seed" not in run.config or seed in found.get(key, ()):
            key = f"{key} {place}"
        found.setdefault(key, {})[seed] = run
    return list(found.values())


def _measures(run: Run, base: Run | None) -> dict[str, float]:
    ours, goal = summary(run), None if base is None else base.final("eval_loss")
    found = {"loss": ours.eval_loss, "exact": ours.exact, "tokens_per_s": ours.tokens_per_s}
    found["peak_memory_gib"] = ours.peak_memory_gib
    if ours.eval_loss is not None and goal is not None:
        if run is not base:
            found["difference"] = ours.eval_loss - goal
        evaluated_N, losses_N = run.rows["eval_loss"].finite
        steps_N, seconds_N = run.rows["step_time_s"].finite
        reached_N = evaluated_N[losses_N <= goal]
        if len(reached_N):
            found["time_to_base_s"] = float(seconds_N[steps_N <= reached_N[0]].sum())
    return {name: value for name, value in found.items() if value is not None}


def _after(half: float | None, form: str) -> str:
    return "" if half is None else f" ± {half:{form}}"


MEASURES: dict[str, tuple[str, Callable[[Spread], str]]] = {
    "loss": ("held-out loss ± s.d.", lambda found: f"{found.mean:.4f}{_after(found.deviation, '.4f')}"),
    "difference": ("difference ± 95 %", lambda found: f"{found.mean:+.5f}{_after(found.interval, '.5f')}"),
    "exact": ("exact", lambda found: percent(found.mean)),
    "tokens_per_s": ("tokens/s", lambda found: f"{found.mean:,.0f}"),
    "time_to_base_s": ("time to its loss (n)", lambda found: f"{duration_text(found.mean)} ({found.n})"),
    "peak_memory_gib": ("memory", lambda found: gib(found.mean)),
}
"""With heads and as text. exact: the share of samples that are their reference. time_to_base_s: of training,
to an evaluation as low as the last of the baseline's run, over the n seeds that get there.
"""


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A table as text: its heads, and a line for each row; without the columns that would be empty."""
    columns = {"runs": [row.name + " (baseline)" * row.is_base for row in rows]}
    columns["n"] = [f"{row.n}" for row in rows]
    for name, (head, form) in MEASURES.items():
        columns[head] = [form(row.measured[name]) if name in row.measured else "" for row in rows]
    columns["note"] = [row.note for row in rows]
    kept = {head: column for head, column in columns.items() if any(column)}
    return [(*kept,), *zip(*kept.values(), strict=True)]
