"""shadow.jsonl: what the shadow check of a run measured, layer by layer.

Every N steps a run may repeat a micro-batch in high precision on the same weights. For each linear layer it
writes how far the gradient and the output of low precision are from those: a cosine and a signal-to-noise
ratio in dB, and the fractions of values that were saturated or became zero.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lptune.base.text import number_of, without_number
from lptune.tools.report.files import read_objects
from lptune.tools.report.rows import LARGEST

MEASURES = {
    "gradient_sqnr_db": "gradient SQNR (dB)",
    "gradient_cosine": "gradient cosine",
    "output_sqnr_db": "output SQNR (dB)",
    "saturated": "saturated",
    "underflowed": "underflowed",
}
"""Key of a layer -> heading. Of the first three a small value is bad, of the others a large one."""
LARGE_IS_BAD = ("saturated", "underflowed")


class Check(NamedTuple):
    """One check, after the step `step`."""

    step: int
    loss: float | None
    shadow_loss: float | None
    layers: Mapping[str, Mapping[str, float]]
    """Name of a layer -> measure -> value."""


class Group(NamedTuple):
    """The layers that differ in the number of their block alone."""

    name: str
    """With `#` for the number."""
    worst: Mapping[str, tuple[float, str]]
    """Measure -> the worst value, and the number of its block."""
    sqnr_by_block: tuple[tuple[str, float], ...]
    """Number of the block, gradient_sqnr_db; in the order of the numbers."""


class Shadow(NamedTuple):
    """All checks of a run."""

    checks: tuple[Check, ...] = ()
    switched: tuple[tuple[int, str], ...] = ()
    """Step, name of a layer that was switched to high precision there."""

    def groups(self) -> list[Group]:
        """The last check, in groups of layers, the worst gradient first."""
        if not self.checks:
            return []
        members = dict[str, dict[str, Mapping[str, float]]]()
        for name, measured in self.checks[-1].layers.items():
            members.setdefault(without_number(name), {})[name] = measured
        groups = [_group(name, layers) for name, layers in members.items()]
        return sorted(groups, key=lambda group: group.worst.get("gradient_sqnr_db", (math.inf, ""))[0])


def _group(name: str, layers: Mapping[str, Mapping[str, float]]) -> Group:
    blocks = {each: str(number) if (number := number_of(each)) is not None else "" for each in layers}
    worst = dict[str, tuple[float, str]]()
    for measure in MEASURES:
        found = [
            (measured[measure], blocks[each]) for each, measured in layers.items() if measure in measured
        ]
        if found:
            choose = max if measure in LARGE_IS_BAD else min
            worst[measure] = choose(found)
    sqnr = {each: layers[each]["gradient_sqnr_db"] for each in layers if "gradient_sqnr_db" in layers[each]}
    ordered = sorted(sqnr, key=lambda each: number_of(each) or 0)
    return Group(name, worst, tuple((blocks[each], sqnr[each]) for each in ordered))


def read_shadow(path: Path) -> tuple[Shadow, str]:
    """The checks in shadow.jsonl, and a note if the file is there and some of it cannot be used."""
    rows, note = read_objects(path)
    checks, switched = list[Check](), list[tuple[int, str]]()
    for row in rows or []:
        step, layers = row.get("step"), row.get("layers")
        if type(step) is not int or not isinstance(layers, dict):
            continue
        measured = {
            str(name)[:200]: {
                key: number for key in MEASURES if (number := _number(found.get(key))) is not None
            }
            for name, found in layers.items()
            if isinstance(found, dict)
        }
        checks.append(Check(step, _number(row.get("loss")), _number(row.get("shadow_loss")), measured))
        names = row.get("switched_to_high")
        switched += [(step, str(name)[:200]) for name in names] if isinstance(names, list) else []
    checks.sort(key=lambda check: check.step)
    return Shadow(tuple(checks), tuple(switched)), note


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < LARGEST else None
