"""The last lines of a run: what came of it, where it is, and the next commands.

They are made from the files of the run alone, so a run that was continued is summed up as a whole, and a
copied recipe has them, too.
"""

import json
import os
import shlex
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lptune import progress
from lptune.config import RunConfig, printable

Record = dict[str, Any]


def show(cfg: object) -> None:
    """Prints the summary of a run that trains and has metrics, on rank 0."""
    if not isinstance(cfg, RunConfig) or os.environ.get("RANK", "0") != "0":
        return
    folder = Path(cfg.output_dir).expanduser()
    with suppress(OSError):  # the run is done, whatever has become of its files
        records = list(_records(folder / "metrics.jsonl"))
        if any("loss" in record for record in records):
            progress.print_line("\n".join(lines(cfg, folder, records)))


def lines(cfg: RunConfig, folder: Path, records: list[Record]) -> list[str]:
    """The summary of the run in `folder`, of which `records` are the lines of metrics.jsonl."""
    steps = [record for record in records if record.get("loss") is not None]
    facts = {
        "done": _done(steps),
        "held-out": _held_out(records),
        "precision": _share(cfg, steps),
        "memory": _memory(steps),
        "files": _files(folder),
    }
    found = [f"{name:<9}  {printable(fact)}" for name, fact in facts.items() if fact]
    commands = _next(folder)
    return [*found, *(["next"] if commands else []), *(f"  {command}" for command in commands)]


def _done(steps: list[Record]) -> str:
    if not steps:
        return ""
    seconds = sum(_number(record, "step_time_s") + _number(record, "compile_time_s") for record in steps)
    compiled = sum(_number(record, "compile_time_s") for record in steps)
    rates = [record["tokens_per_s"] for record in steps if record.get("tokens_per_s")]
    rate = f", {statistics.median(rates):,.0f} tokens/s" if rates else ""
    of_it = f" ({progress.duration_text(compiled)} of it compiling)" if compiled >= 0.1 else ""
    count = f"{steps[-1]['step']} step{'s' * (steps[-1]['step'] > 1)}"
    return f"{count} in {progress.duration_text(seconds)}{of_it}{rate}"


def _held_out(records: list[Record]) -> str:
    losses = {
        record["step"]: record["eval_loss"] for record in records if record.get("eval_loss") is not None
    }
    if not losses:
        return ""
    last, best = max(losses), min(losses, key=lambda step: (losses[step], step))
    before = f"loss {losses[0]:.4f} before training, " if 0 in losses and last else "loss "
    lowest = f"; lowest {losses[best]:.4f} at step {best}" if losses[best] < losses[last] else ""
    return f"{before}{losses[last]:.4f} after step {last}{lowest}"


def _share(cfg: RunConfig, steps: list[Record]) -> str:
    shares = [record.get("low_precision_flops_fraction") for record in steps]
    share = shares[-1] if shares else None
    if cfg.precision.is_none or share is None:
        return ""
    return f"{cfg.precision.kind} ran {share:.0%} of the FLOPs of the linear layers in 8 bits"


def _memory(steps: list[Record]) -> str:
    peaks = [record["peak_memory_gib"] for record in steps if record.get("peak_memory_gib")]
    return f"{max(peaks):.2f} GiB at most on rank 0" if peaks else ""


def _files(folder: Path) -> str:
    names = ("export", "report.html", "metrics.jsonl")
    here = [name + "/" * (folder / name).is_dir() for name in names if (folder / name).exists()]
    return f"{folder}: {', '.join(here)}"


def _next(folder: Path) -> list[str]:
    """Commands for the model that came out."""
    if not (folder / "export").is_dir():
        return []
    model = f"model.path={shlex.quote(str(folder))}"
    return [
        f"lptune run generate --config generation {model}",
        f"lptune run evaluate --config evaluation {model} data.source=rows.jsonl",
        f"lptune report {shlex.quote(str(folder))} --open",
    ]


def _records(path: Path) -> Iterator[Record]:
    """The lines of metrics.jsonl that a run wrote."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return value if isinstance(value, int | float) else 0.0
