"""Tasks of lm_eval where it is missing, and their keys. Needs no lm_eval."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest

from lptune import data
from lptune.base.errors import UserError
from lptune.config import HarnessConfig
from lptune.distributed import World
from lptune.inference import read_tasks


def test_without_lm_eval_one_line_says_what_to_install(
    checkpoint: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = data.load_tokenizer(checkpoint)
    assert read_tasks(HarnessConfig(), tokenizer, world) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = r"harness.tasks: lm_eval is not installed; (run: .*lm-eval|install the packages)"
    with pytest.raises(UserError, match=line):
        read_tasks(HarnessConfig(tasks=("hellaswag",)), tokenizer, world)


def test_reading_tasks_is_shown_as_that_and_not_as_the_data(
    checkpoint: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "lptune.inference.harness", mock.Mock())
    read_tasks(HarnessConfig(tasks=("hellaswag",)), data.load_tokenizer(checkpoint), world)
    assert capsys.readouterr().out == "reading harness.tasks ...\n"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_fewshot": 5}, "harness.num_fewshot: needs harness.tasks"),
        ({"task_folder": "tasks"}, "harness.task_folder: needs harness.tasks"),
        ({"tasks": ("a",), "max_length": 1}, "harness.max_length: must be at least 2"),
        ({"tasks": ("a",), "num_fewshot": -1}, "harness.num_fewshot"),
        ({"tasks": ("a",), "output": ""}, "harness.output: is empty"),
    ],
)
def test_wrong_keys_are_one_line(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HarnessConfig(**keys)  # type: ignore[arg-type]
