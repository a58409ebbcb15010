"""Overrides with several values -> the runs of a sweep and their names.

A value ends at a comma. Brackets and quotes protect commas: `precision.skip=[lm_head,a],[lm_head]` are two
values, `data.prompt_template='"A, B"'` is one. A quote protects only where a value begins with it, so an
apostrophe within a text is a character like any other.

A run is named by the keys that vary: `lr=1e-5,kind=none`. A key is shortened to its last parts as long as the
names stay unique. Characters that a shell or a file system takes for something else become `-`, and the name
then ends with six digits of a digest, so that different values have different names. The name depends on the
run's own values only: a sweep with more values has the same names for the old ones.
"""

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS

MAX_RUNS = 100
"""Above this number of runs, --max-runs must confirm that the grid is meant."""

_PAIRS = {"[": "]", "{": "}", "(": ")"}
_MAX_NAME = 120  # bytes; a file system's limit is 255, and a run adds nothing to the name of its folder
_MAX_VALUE = 40


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    overrides: tuple[str, ...]
    """All arguments `key=value` of the run, without output_dir."""
    row: str
    """The name that the run would have without a seed: runs of one row share it."""


class Grid:
    """The points of a sweep.

    overrides: `key=value[,value…]` of the command line; `precision.kind=all` has every kind, none first, and
    `precision.emulate` is then for those of float8 alone: devices have INT8. Raises UserError (one line) for
    a value that is empty, twice there or not closed, for a key that is there twice, and for a grid without a
    key to vary.
    """

    def __init__(self, overrides: Sequence[str], max_runs: int = MAX_RUNS) -> None:
        values: dict[str, list[str]] = {}
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator:
                raise UserError(f"sweep: {override}: overrides have the form key=value,value,…")
            if key == "output_dir":
                raise UserError(
                    "sweep: output_dir: each run has its own folder; give `--output-dir FOLDER` before the "
                    "recipe"
                )
            if key in values:
                raise UserError(f"sweep: {key}: is given twice; write its values behind one `=`")
            values[key] = split_values(key, text)
        self.has_all_kinds = values.get("precision.kind") == ["all"]
        if self.has_all_kinds:
            values["precision.kind"] = list(PRECISION_KINDS)
        self.varied = {key: found for key, found in values.items() if len(found) > 1}
        if not self.varied:
            raise UserError(
                "sweep: no key has several values, e.g. optimizer.lr=1e-5,3e-5; for one run use `lptune run`"
            )
        num_runs = math.prod(map(len, self.varied.values()))
        if num_runs > max_runs:
            raise UserError(f"sweep: the grid has {num_runs} runs; --max-runs {num_runs} allows that")
        self.points = list(self._points(values))

    def _points(self, values: dict[str, list[str]]) -> list[Point]:
        names = short_names(list(self.varied))
        points = []
        for chosen in itertools.product(*values.values()):
            pairs = dict(zip(values, chosen, strict=True))
            if self.has_all_kinds and not PRECISION_KINDS[pairs["precision.kind"]].needs_float8:
                pairs.pop("precision.emulate", None)
            name, row = (
                point_name([(names[key], pairs[key]) for key in self.varied if key != left_out])
                for left_out in ("", "seed")
            )
            points.append(Point(name, tuple(f"{key}={value}" for key, value in pairs.items()), row))
        return points


def split_values(key: str, text: str) -> list[str]:
    """The values of `text`. Raises UserError for an empty or repeated one and an open bracket or quote."""
    values, current, closing, quote = [], "", list[str](), ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not current.strip():
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            values.append(current)
            current = ""
            continue
        current += char
    if quote or closing:
        missing = quote or closing[-1]
        raise UserError(f"sweep: {key}: {missing} is missing at the end; put the whole value in quotes")
    values.append(current)
    if len(values) == 1:
        return values
    values = [value.strip() for value in values]
    for value, count in Counter(values).items():
        if not value:
            raise UserError(f"sweep: {key}: has an empty value in {text!r:.60}; quote it or take it out")
        if count > 1:
            raise UserError(f"sweep: {key}: has the value {value!r:.60} twice; take one out")
    return values


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> as many of its last parts as tell it from all others: `optimizer.lr` -> `lr`."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            tail = parts[-count:]
            if sum(other.split(".")[-count:] == tail for other in keys) == 1:
                break
        found[key] = ".".join(tail)
    return found


def point_name(pairs: Sequence[tuple[str, str]]) -> str:
    """`lr=1e-5,kind=none`, safe in shells and file systems."""
    exact = ",".join(f"{key}={value}" for key, value in pairs)
    safe = ",".join(f"{key}={_safe(value)}" for key, value in pairs)[:_MAX_NAME].rstrip(".,=-")
    if safe == exact:
        return safe
    return f"{safe}-{hashlib.sha256(exact.encode(errors='surrogateescape')).hexdigest()[:6]}"


def _safe(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value)[:_MAX_VALUE].strip("-")
