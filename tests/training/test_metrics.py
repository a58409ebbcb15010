"""What a terminal, a log and trackers get of each step: lines of at most 80 columns, a bar, numbers."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lptune.config import LoggingConfig
from lptune.training.metrics import Bar, TimeLeft, evaluation_line, step_line
from lptune.training.trackers import open_trackers
from tests.base.test_progress import terminal

RECORD: dict[str, Any] = {
    "step": 20,
    "loss": 2.99786,
    "lr": 3e-3,
    "grad_norm": 1.7327,
    "tokens_per_s": 25069.4,
    "num_skipped": 0,
    "peak_memory_gib": 0.54,
}


def test_a_step_is_a_line_with_its_numbers() -> None:
    assert step_line(RECORD, 600) == (
        "step 20/600  loss 2.9979  lr 3.00e-03  grad_norm 1.733  25,069 tokens/s"
    )
    assert step_line({"step": 3, "loss": None, "num_skipped": 2}, 600) == "step 3/600  num_skipped 2"


def test_what_finds_no_room_is_left_out_and_the_loss_never() -> None:
    wide = {**RECORD, "step": 1_000_000, "accuracy": 0.5121}
    assert step_line(wide, 2_000_000) == (
        "step 1000000/2000000  loss 2.9979  accuracy 0.512  25,069 tokens/s"
    )
    for num_steps in (9, 999, 99_999, 9_999_999):
        for tokens_per_s in (9.0, 9e6):
            line = step_line({**RECORD, "step": num_steps, "tokens_per_s": tokens_per_s}, num_steps)
            assert len(line) <= 80
            assert "loss 2.9979" in line


def test_an_evaluation_is_a_line_of_its_own_with_the_loss_of_each_source() -> None:
    assert evaluation_line(RECORD, 600) is None
    found = {**RECORD, "eval_loss": 1.5, "eval_loss/code": 1.25, "eval_accuracy": 0.75}
    assert evaluation_line(found, 600) == (
        "step 20/600  eval_loss 1.5000  eval_loss/code 1.2500  eval_accuracy 0.750"
    )
    assert evaluation_line({"step": 0, "eval_loss": 6.9}, 600) == "step 0/600  eval_loss 6.9000"


def test_the_time_left_leaves_out_the_first_step_which_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lptune.training.metrics.time.monotonic", lambda: now[0])
    left = TimeLeft(101)
    now[0] = 300.0
    left.add(11)
    assert left.text(11) == "", "one step, with 300 s of compilation, says nothing about the others"
    now[0] = 320.0
    left.add(21)
    assert left.text(21) == "  (about 2 min 40 s left)"  # 80 steps of 2 s
    assert left.text(101) == ""


def test_the_bar_keeps_its_shape_while_numbers_change() -> None:
    with terminal() as screen:
        bar = Bar(0, 600)
        bar._bar.mininterval = 0.0
        shapes = set()
        for step, tokens_per_s in ((1, 9_700.0), (2, 10_100.0), (3, 980.0)):
            bar.show({**RECORD, "step": step, "tokens_per_s": tokens_per_s, "eval_loss": 6.8629})
            bar._bar.refresh()
            line = screen.lines()[-1]
            assert len(line) <= 80
            assert "loss 2.9979  eval 6.8629" in line
            shapes.add(("tok/s" in line, "GiB" in line, "lr" in line))
        bar.show({key: value for key, value in RECORD.items() if key != "eval_loss"} | {"step": 4})
        bar._bar.refresh()
        assert "eval 6.8629" in screen.lines()[-1], "the last evaluation stays"
        bar.close()
    assert shapes == {(True, True, False)}


def test_a_wide_terminal_shows_the_learning_rate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as screen:
        monkeypatch.setenv("COLUMNS", "110")
        bar = Bar(0, 600)
        bar.show({**RECORD, "num_skipped": 3})
        bar._bar.refresh()
        assert "3 skipped  loss 2.9979  25,069 tok/s  0.5 GiB  lr 3.0e-03" in screen.lines()[-1]
        bar.close()


CONFIG = "model:\n  path: m\noptimizer:\n  lr: 0.001\nsecret: ${oc.env:TOKEN}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has begun."""
    monkeypatch.setenv("TOKEN", "do not show")
    run = tmp_path / "my-run"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (run / "run.json").write_text(json.dumps({"id": "1a2b3c4d", "launches": []}), encoding="utf-8")
    return run


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_continues_the_run_of_the_same_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[tuple[str, Any]] = []
    fake = SimpleNamespace(
        init=lambda **keys: calls.append(("init", keys)),
        log=lambda values, step: calls.append(("log", (values, step))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, name, fake)
    (tracker,) = open_trackers(folder, LoggingConfig(**{f"{name}_project": "p"}), 7)
    tracker.log({"loss": 1.5}, 8)
    tracker.close()
    (_, keys), *others = calls
    assert others == [("log", ({"loss": 1.5}, 8)), ("finish", None)]
    assert keys["project"] == "p"
    assert keys["resume"] == "allow"
    assert keys["config"]["optimizer"] == {"lr": 0.001}
    assert "do not show" not in str(keys), "a variable's value may be a secret"
    assert (
        (keys["id"], keys["name"]) == ("1a2b3c4d", "my-run")
        if name == "wandb"
        else keys["name"] == ("my-run-1a2b3c4d")
    )


def test_tensorboard_hides_the_steps_that_come_again(folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = LoggingConfig(tensorboard=True)
    for first_step, losses in ((0, [3.0, 2.0, 1.0]), (1, [2.5, 1.5])):
        (tracker,) = open_trackers(folder, cfg, first_step)
        for step, loss in enumerate(losses, first_step + 1):
            tracker.log({"loss": loss}, step)
        tracker.close()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.5), (3, 1.5)]
    (text,) = events.Tensors("config.yaml/text_summary")
    assert b"lr: 0.001" in text.tensor_proto.string_val[0]
