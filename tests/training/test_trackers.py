"""Trackers get the id of the run, its config and the numbers of each step."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lptune.config import LoggingConfig
from lptune.training.trackers import open_trackers

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
