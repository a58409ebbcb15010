"""`lptune validate` looks at the model that is there, and `lptune run` refuses one in the same words, both
without torch.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint
from lptune.base.errors import UserError
from tests.cli.conftest import Command, write_model

CONFIG = "model: {path: m}\ndata: {source: builtin}\ndevice: cpu\n"


def _keys(**keys: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | keys))

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_keys(model_type="gpt_neox"), "m/config.json: model_type: 'gpt_neox' is not supported"),
        (_keys(hidden_size="64"), "hidden_size: expected an integer"),
        (lambda m: (m / "model.safetensors").unlink(), "m: holds no *.safetensors file"),
        (lambda m: os.truncate(m / "model.safetensors", 40), "m/model.safetensors: is no readable"),
        (shutil.rmtree, ""),
    ],
)
def test_a_model_is_refused_in_the_words_of_the_run(
    command: Command, change: Callable[[Path], object], found: str
) -> None:
    Path("c.yaml").write_text(CONFIG)
    change(write_model(Path("m")))
    code, stdout, stderr = command("validate", "c.yaml")
    if not found:  # it may be downloaded later; the run needs it now
        assert (code, stderr) == (0, "")
        assert "note: model.path: m does not exist here yet\n" in stdout
    else:
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert found in stderr
    early = command("run", "full_finetune", "--config", "c.yaml")
    assert early[:2] == (2, "")
    with pytest.raises(UserError) as late:
        checkpoint.read_base("m", print)
    assert early[2] == f"error: {late.value}\n"
    assert early[2] == stderr or not found


def test_the_teacher_is_looked_at_under_its_own_key(command: Command) -> None:
    write_model(Path("m"))
    Path("teacher/checkpoints").mkdir(parents=True)
    Path("c.yaml").write_text(f"{CONFIG}teacher: {{path: teacher}}\n")
    code, _, stderr = command("validate", "distill", "--config", "c.yaml")
    assert (code, stderr) == (
        2,
        "error: teacher.path: teacher is a run's folder; the model it trained is teacher/export\n",
    )
    assert command("validate", "distill", "--config", "c.yaml", "teacher.path=m")[0] == 0


def test_what_is_not_trained_may_be_the_model_of_a_run(command: Command) -> None:
    Path("c.yaml").write_text("model: {path: run}\nprompts: {source: p.jsonl}\noutput: out.jsonl\n")
    Path("run/checkpoints").mkdir(parents=True)
    assert command("validate", "generate", "--config", "c.yaml")[0] == 0
    Path("run/checkpoints").rmdir()
    code, _, stderr = command("validate", "generate", "--config", "c.yaml")
    assert code == 2
    assert command("run", "generate", "--config", "c.yaml") == (2, "", stderr)


def test_the_model_of_an_own_recipe_is_the_recipes_business(command: Command) -> None:
    Path("c.yaml").write_text(CONFIG)
    _keys(model_type="gpt_neox")(write_model(Path("m")))
    assert command("cp", "full_finetune", "mine.py")[0] == 0
    assert command("validate", "mine.py", "--config", "c.yaml")[0] == 0
