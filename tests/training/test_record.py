"""The record of a step: rates leave out compilation, and rows say when they were written."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lptune import distributed, training
from lptune.distributed import Compiled

TOKENS_PER_STEP = 640


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the only element."""
    now = [100.0]
    monkeypatch.setattr("lptune.training.record.time.perf_counter", lambda: now[0])
    return now


def _meter() -> tuple[Any, distributed.World]:
    world = distributed.World(0, 1, torch.device("cpu"), mesh=None)  # type: ignore[arg-type]
    cfg: Any = SimpleNamespace(tokens_per_step=TOKENS_PER_STEP, compute_dtype="bfloat16")
    plan: Any = None  # a CPU has no peak, so nothing is read of the plan
    return training.StepMeter(cfg, plan, plan, world), world


def _record(meter: Any) -> dict[str, Any]:
    low: Any = SimpleNamespace(
        verified=SimpleNamespace(low_precision_flops_fraction=None), metrics=lambda: {"num_saturated": 4}
    )
    update: Any = SimpleNamespace(num_skipped=0)
    record: dict[str, Any] = meter.record(
        3, training.Updated(1.0, 2.0), 600, 0.1, np.array([TOKENS_PER_STEP]), update, low
    )
    return record


def test_rates_leave_out_the_time_of_compilation(clock: list[float]) -> None:
    meter, world = _meter()
    world.compile_watch.duration_s = 7.0  # of an evaluation before the first step
    meter.start()
    clock[0] += 32.0
    world.compile_watch.duration_s += 30.0
    with meter.left_out():
        clock[0] += 5.0  # of a shadow check
    meter.stop()
    first = _record(meter)
    assert (first["step_time_s"], first["compile_time_s"]) == (2.0, 30.0)
    assert first["tokens_per_s"] == TOKENS_PER_STEP / 2.0
    meter.start()
    clock[0] += 1.6
    meter.stop()
    later = _record(meter)
    assert later["step_time_s"] == pytest.approx(1.6)
    assert later["compile_time_s"] == 0.0
    assert later["tokens_per_s"] == pytest.approx(400.0)


def test_what_was_compiled_is_told_once_after_the_step(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meter, world = _meter()
    news = iter([Compiled(75.2, 6, 2), None])
    monkeypatch.setattr(world.compile_watch, "news", lambda: next(news))
    meter.start()
    assert capsys.readouterr().out == ""
    meter.stop()
    assert capsys.readouterr().out == "compiling: 1 min 15 s, 2 of 6 graphs from the cache\n"
    meter.start()
    meter.stop()
    assert capsys.readouterr().out == ""


def test_a_record_says_when_it_was_made() -> None:
    meter, _ = _meter()
    meter.start()
    meter.stop()
    before = datetime.now(UTC)
    made = datetime.fromisoformat(_record(meter)["time"])
    # To the millisecond, rounded down.
    assert -0.001 <= (made - before).total_seconds() <= (datetime.now(UTC) - before).total_seconds()
    assert made.tzinfo == UTC
