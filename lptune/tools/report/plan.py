"""precision_plan.json as a table that stays readable at 200 layers.

Most layers of a model differ only in the number of their block, so these share a row, as in the table that a
run prints: `model.layers.0-27.mlp.up_proj`.
"""

from pathlib import Path
from typing import Any, NamedTuple

from lptune.base.text import group_name, without_number
from lptune.tools.report.files import read_object

COLUMNS = ("layer", "out × in", "output", "grad_input", "grad_weight", "all-gather", "note")
"""The columns of the table of a plan."""
_GEMMS = ("output", "grad_input", "grad_weight", "all_gather")
_MAX_LAYERS = 100_000


class Plan(NamedTuple):
    """The precision of every linear layer of a run."""

    kind: str = ""
    layers: tuple[tuple[str, ...], ...] = ()
    """For each layer, in module order, the cells of COLUMNS."""
    num_converted: int = 0

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of COLUMNS; layers that differ in one number of their names alone share a row."""
        groups = dict[tuple[str, ...], list[str]]()
        for name, *cells in self.layers:
            groups.setdefault((without_number(name), *cells), []).append(name)
        return [(group_name(names), *key[1:]) for key, names in groups.items()]


def read_plan(path: Path) -> tuple[Plan, str]:
    """The plan in precision_plan.json, and a note if the file is there and cannot be used."""
    content, note = read_object(path)
    if content is None:
        return Plan(), note
    rows = content.get("layers")
    if not isinstance(rows, list):
        return Plan(), "has no list of layers"
    layers = [_cells(row) for row in rows[:_MAX_LAYERS] if isinstance(row, dict)]
    num_converted = sum(isinstance(row, dict) and bool(row.get("spec")) for row in rows)
    return Plan(str(content.get("kind", ""))[:80], tuple(layers), num_converted), ""


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = row.get("shape")
    sizes = [str(size)[:20] for size in shape[:2]] if isinstance(shape, list) else []
    gemms = [str(row.get(name, ""))[:80] for name in _GEMMS]
    reason = row.get("reason") or ("emulated" if _is_emulated(row) else "")
    return (str(row.get("name", ""))[:200], " × ".join(sizes), *gemms, str(reason)[:200])


def _is_emulated(row: dict[str, Any]) -> bool:
    spec = row.get("spec")
    return isinstance(spec, dict) and spec.get("emulate") is True
