"""The table of a sweep: its runs, the one with the lowest final held-out loss first."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lptune.base import text
from lptune.base.files import lines_of, object_of

_WORDS = {0: "done", 3: "diverged", 143: "stopped", None: "not run"}


@dataclass(frozen=True)
class Result:
    """What a run has left behind. None where its metrics do not have the number."""

    name: str
    exit_code: int | None
    eval_loss: float | None = None
    loss: float | None = None
    step: int | None = None
    tokens_per_s: float | None = None


def result(name: str, folder: Path, exit_code: int | None) -> Result:
    """Reads metrics.jsonl in `folder`: the last number of each key, of the speeds the median. A row that
    cannot be read is passed over: the run may have been killed in the middle of it.
    """
    last: dict[str, float] = {}
    speeds = list[float]()
    with suppress(OSError, ValueError):  # no regular file, or a line without an end
        for line in lines_of(folder / "metrics.jsonl"):
            row = object_of(line) or {}
            for key in ("eval_loss", "loss", "step"):
                if (value := _as_number(row.get(key))) is not None:
                    last[key] = value
            if (speed := _as_number(row.get("tokens_per_s"))) is not None:
                speeds.append(speed)
    step = int(last["step"]) if math.isfinite(last.get("step", math.nan)) else None
    speed = statistics.median(speeds) if speeds else None
    return Result(name, exit_code, last.get("eval_loss"), last.get("loss"), step, speed)


def _as_number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # JSON's integers have no largest one
            return float(value)
    return None


def table(results: Sequence[Result]) -> str:
    """One line for each run, sorted: by held-out loss, or by loss if no run was evaluated. Runs that did not
    end well come last.
    """
    key = "eval_loss" if any(each.eval_loss is not None for each in results) else "loss"

    def order(each: Result) -> tuple[bool, bool, float]:
        value = getattr(each, key)
        has_number = value is not None and math.isfinite(value)
        return each.exit_code != 0, not has_number, value if has_number else 0.0

    rows = [("held-out loss", "loss", "step", "tokens/s", "result", "run")]
    for each in sorted(results, key=order):
        rows.append(
            (
                _number(each.eval_loss, ".4f"),
                _number(each.loss, ".4f"),
                _number(each.step, "d"),
                _number(each.tokens_per_s, ",.0f"),
                _WORDS.get(each.exit_code) or f"failed ({each.exit_code})",
                each.name,
            )
        )
    return "\n".join(text.table(rows, ">>>><"))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
