"""What a run came to, in a few numbers: the tiles of one run, the table of several."""

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lptune.base.text import duration_text
from lptune.tools.report.charts import number
from lptune.tools.report.run import Run, value_text

NOT_COMPARED = ("output_dir", "resume")
"""Keys that name a place, not a setting."""
_MISSING = object()


class Summary(NamedTuple):
    """The numbers of a run; None: the run has none."""

    last_step: int
    first_eval_loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    loss: float | None
    """The mean of the last twentieth of the steps."""
    tokens_per_s: float | None
    """The median of all steps, without compilation."""
    train_time_s: float | None
    compile_time_s: float | None
    rest_s: float | None
    """What the steps to come take at the median time of those that were, if the run goes on."""
    peak_memory_gib: float | None
    low_fraction: float | None
    num_skipped: int
    exact: float | None
    """The share of the last samples whose answer is the reference."""
    started: str
    last_row: str


def summary(run: Run) -> Summary:
    """What `run` came to, from its rows."""
    rows = run.rows
    evaluations_N = rows["eval_loss"].finite.values_N
    losses_N = rows["loss"].finite.values_N
    tail_N = losses_N[-max(1, len(losses_N) // 20) :]
    speeds_N = rows["tokens_per_s"].finite.values_N
    durations_N = rows["step_time_s"].finite.values_N
    num_to_come = run.status.num_steps - rows.last_step if run.status.word == "running" else 0
    memory_N = rows["peak_memory_gib"].finite.values_N
    last_sample = max((sample.step for sample in run.samples), default=0)
    samples = [sample for sample in run.samples if sample.step == last_sample and sample.reference]
    num_exact = sum(sample.answer == sample.reference for sample in samples)
    return Summary(
        last_step=rows.last_step,
        first_eval_loss=float(evaluations_N[0]) if len(evaluations_N) > 1 else None,
        eval_loss=run.final("eval_loss"),
        best_eval_loss=float(evaluations_N.min()) if len(evaluations_N) else None,
        loss=float(tail_N.mean()) if len(tail_N) else None,
        tokens_per_s=float(np.median(speeds_N)) if len(speeds_N) else None,
        train_time_s=_sum(run, "step_time_s"),
        compile_time_s=_sum(run, "compile_time_s"),
        rest_s=float(np.median(durations_N)) * num_to_come if num_to_come > 0 and len(durations_N) else None,
        peak_memory_gib=float(memory_N.max()) if len(memory_N) else None,
        low_fraction=run.final("low_precision_flops_fraction"),
        num_skipped=int(min(run.final("num_skipped") or 0, 2**53)),
        exact=num_exact / len(samples) if samples else None,
        started=_time(rows.first_time),
        last_row=_time(rows.last_time),
    )


def by_final_loss(runs: Sequence[Run]) -> list[int]:
    """The numbers of the runs, the lowest final held-out loss first; those without one at the end."""

    def key(place: int) -> tuple[float, float]:
        held_out, loss = runs[place].final("eval_loss"), runs[place].final("loss")
        return (math.inf if held_out is None else held_out, math.inf if loss is None else loss)

    return sorted(range(len(runs)), key=key)


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each folder, as short as tells it from the others: `a`, or `x/a` and `y/a`."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    found = []
    for path in paths:
        length = 1
        while length < len(path) and sum(other[-length:] == path[-length:] for other in paths) > 1:
            length += 1
        found.append("/".join(path[-length:]) or "/")
    return found


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The keys whose values are not equal in all configs, in the order of the configs: key -> a text for each
    config, `—` where it has no such key.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {}
    for key in keys:
        values = [config.get(key, _MISSING) for config in configs]
        if key not in NOT_COMPARED and any(not _is_equal(value, values[0]) for value in values):
            found[key] = ["—" if value is _MISSING else value_text(value) for value in values]
    return found


def _is_equal(a: object, b: object) -> bool:
    """Whether two values of configs are one setting: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return a == b


def steps_text(run: Run, before_step: str = ", step ") -> str:
    """`running, step 40 of 120`."""
    of = f" of {run.status.num_steps:,}" if run.status.num_steps else ""
    return f"{run.status.word}{before_step}{run.rows.last_step:,}{of}"


def value(number_or_none: float | None, unit: str = "") -> str:
    """A number with its unit; a dash for None."""
    return "—" if number_or_none is None else f"{number(number_or_none)}{unit}"


def loss_text(loss: float | None) -> str:
    """A loss with four decimals, where that says something; a dash for None."""
    return value(loss) if loss is None or not 1e-3 <= abs(loss) < 1000 else f"{loss:.4f}"


def gib(size: float | None) -> str:
    """A size in GiB with two decimals; a dash for None."""
    return "—" if size is None else f"{size:,.2f} GiB" if abs(size) < 1e6 else f"{number(size)} GiB"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage; a dash for None."""
    return "—" if fraction is None else f"{100 * fraction:.4g} %"


def duration(seconds: float | None) -> str:
    """A duration as text; a dash for None."""
    return "—" if seconds is None else duration_text(min(seconds, 1e12))


def _sum(run: Run, name: str) -> float | None:
    values_N = run.rows[name].finite.values_N
    return float(values_N.sum()) if len(values_N) else None


def _time(text: str) -> str:
    """`2026-11-23 14:05 UTC` from an ISO time; empty if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return ""
    zone = moment.tzname() or ""
    return f"{moment:%Y-%m-%d %H:%M} {zone}".strip()
