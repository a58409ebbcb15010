"""Shared code of the benchmarks: results that survive a kill, device times, compilation without fall-back.

A benchmark on a borrowed GPU is often interrupted. `Results` rewrites its whole JSON file after every row, so
that no measured row is lost. The key "complete" says whether the benchmark finished. gpu_suite.py names one
more file for all its parts, BENCHMARK_ROWS, to which each row is appended.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch


def device_type() -> str:
    """`cuda` if there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """The name of the GPU, or the number of threads of the CPU."""
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )


def facts() -> dict[str, Any]:
    """The facts on which a figure depends: device, driver, versions."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    found: dict[str, Any] = {
        "device": device_name(),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {key: value for key, value in os.environ.items() if key.startswith("LPTUNE_")},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda,
            "capability": list(torch.cuda.get_device_capability()),
            "memory_gib": properties.total_memory / 2**30,
            "processors": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size / 2**20,
        }
    return found


class Results:
    """The rows of a benchmark. If there is a JSON file, it is complete after each row."""

    def __init__(self, path: Path | None, **more: Any) -> None:
        """more: facts in addition to `facts()`."""
        self.content: dict[str, Any] = {**facts(), **more, "complete": False, "rows": []}
        self._path = path
        self._write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that were added so far."""
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    def add(self, **row: Any) -> dict[str, Any]:
        """Adds `row` and writes the file. Values that are not finite become null, as JSON lacks them."""
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = None
        self.rows.append(row)
        rows_file = os.environ.get("BENCHMARK_ROWS")
        if rows_file:
            line = json.dumps({"part": os.environ.get("BENCHMARK_PART"), **row}) + "\n"
            with open(rows_file, "ab", buffering=0) as file:  # one write: a kill leaves no half of a line
                file.write(line.encode())
        self._write()
        return row

    def update(self, **facts: Any) -> None:
        """Adds facts beside the rows, or replaces them, and writes the file."""
        self.content.update(facts)
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.content["complete"] = True
        else:
            self.content["failed"] = f"{kind.__name__}: {error}"
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f".{self._path.name}")
            partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            partial.replace(self._path)  # a kill leaves the previous file or this one, both complete


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with --json, which all benchmarks have."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, help="write the figures there, after each row")
    return made


def strict_compilation(recompilations: int = 8) -> None:
    """Makes Dynamo raise an error after too many compilations of one function, instead of running eagerly.

    There are two limits. The second counts all functions that share a code object.
    """
    config = torch._dynamo.config
    config.recompile_limit = recompilations
    config.accumulated_recompile_limit = max(recompilations, config.accumulated_recompile_limit)
    config.fail_on_recompile_limit_hit = True
    config.suppress_errors = False


def median_ms(calls: Sequence[Callable[[], object]], batch_ms: float = 10) -> float:
    """The device's median milliseconds for one of `calls`, which do the same with different inputs: of five
    batches that take about `batch_ms` each.

    The calls take turns, so that the cache does not contain the next call's input. On CUDA they are recorded
    as a graph, because launching a short kernel takes longer than running it.
    """
    for call in calls:
        call()
    if device_type() == "cpu":
        times = []
        for _ in range(5):
            for call in calls:
                started = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replays_ms(num_replays: int) -> float:
        start.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / num_replays

    replays_ms(1)
    num_replays = max(2, int(batch_ms / max(replays_ms(2), 1e-3)))
    return statistics.median(replays_ms(num_replays) for _ in range(5)) / len(calls)


def fastest_ms(timed: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of the fastest round, by label. Labels take turns, so that other load affects them all."""
    best = dict.fromkeys(timed, float("inf"))
    on_gpu = device_type() == "cuda"
    calls = 10 if on_gpu else 1  # queued together, so that the GPU is timed, not the launches
    for _ in range(rounds):
        for label, once in timed.items():
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                once()
            synchronize()
            best[label] = min(best[label], 1e3 * (time.perf_counter() - started) / calls)
    return best


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
