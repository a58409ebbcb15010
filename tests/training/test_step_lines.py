"""What a terminal or a log shows of a step: no line is wider than 80 columns, and the bar keeps its shape."""

from typing import Any

import pytest

from lptune.training.step_lines import Bar, TimeLeft, evaluation_line, step_line
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
    monkeypatch.setattr("lptune.training.step_lines.time.monotonic", lambda: now[0])
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
