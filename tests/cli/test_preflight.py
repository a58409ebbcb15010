"""What the launcher and `lptune validate` say without torch, the library says in the same words."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lptune import checkpoint, distributed, linear
from lptune.base.errors import UserError
from lptune.cli import preflight
from lptune.config import FinetuneConfig, load_config
from tests.cli.conftest import Command, write_model


def _config(folder: Path, *overrides: str) -> FinetuneConfig:
    (folder / "c.yaml").write_text(f"model: {{path: {folder}/m}}\ndata: {{source: builtin}}\n")
    if not (folder / "m").exists():
        write_model(folder / "m")
    return load_config(FinetuneConfig, folder / "c.yaml", overrides)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_may_have_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)


def test_float8_on_a_cpu_is_refused_in_the_words_of_the_conversion(tmp_path: Path) -> None:
    cfg = _config(tmp_path, "device=cpu", "precision.kind=float8_rowwise")
    with pytest.raises(UserError) as early:
        preflight.check(cfg, 1, 1)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UserError, match="and cpu here has none") as late:
        linear.convert(model, cfg.precision, device=torch.device("cpu"))
    assert str(early.value) == str(late.value)


def test_a_gpu_that_is_not_there_is_refused_as_by_the_session(tmp_path: Path) -> None:
    with pytest.raises(UserError) as early:
        preflight.check(_config(tmp_path, "device=cuda"), 1, 1)
    with pytest.raises(UserError) as late, distributed.session("cuda"):
        pass
    found = "this machine has no GPU", "torch sees no CUDA device"
    assert str(early.value).replace(found[0], found[1]) == str(late.value)


@pytest.mark.parametrize(("num_machines", "said"), [("1", "do not divide among 3"), ("2", "--node-rank")])
def test_the_batch_is_compared_with_ranks_that_are_all_known(
    num_machines: str, said: str, command: Command, tmp_path: Path
) -> None:
    # The other machine may have one rank: four in all.
    _config(tmp_path)
    flags = [f"--nnodes={num_machines}", "--nproc-per-node=3", "--node-rank=2", "--rdzv-endpoint=localhost:1"]
    keys = ["global_batch_size=4", "micro_batch_size=1"]
    code, _, errors = command("run", *flags, "full_finetune", "--config", str(tmp_path / "c.yaml"), *keys)
    assert code == 2
    assert said in errors


def test_a_rank_without_a_gpu_of_its_own_is_one_line_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = "--nproc-per-node: rank 2 of this machine has no GPU, there are 2; start fewer ranks"
    with pytest.raises(UserError, match=said), distributed.session("cuda"):
        pass


@pytest.mark.parametrize("key", ["data.source", "data.eval_source"])
def test_every_source_of_a_list_must_be_there(tmp_path: Path, key: str) -> None:
    (tmp_path / "shards").mkdir()
    listed = f"[builtin, owner/set, {{source: {tmp_path}/shards, format: text}}, '{tmp_path}/*.csv']"
    cfg = _config(tmp_path, "device=cpu", f"{key}={listed}")
    for name, missing in (
        ("shards/a.jsonl", "shards: is a folder without"),
        ("b.csv", r"\*.csv: no file has this name or matches"),
    ):
        with pytest.raises(UserError, match=rf"{missing}.* {key}"):
            preflight.check(cfg, 1, 1)
        (tmp_path / name).write_text("")
    preflight.check(cfg, 1, 1)


CONFIG = "model: {path: m}\ndata: {source: builtin}\ndevice: cpu\n"


def test_validate_says_what_does_not_go_on_one_rank(command: Command) -> None:
    keys = ("optimizer.in_backward=true", "global_batch_size=8", "micro_batch_size=2", "data.source=builtin")
    code, out, err = command("validate", "llama3_2/1b", *keys)
    assert (code, err) == (0, "")
    assert "note: not on one rank: optimizer.in_backward: updates a weight before" in out
    code, out, err = command("validate", "llama3_2/1b", *keys[1:])
    assert (code, err) == (0, "")
    assert "one rank" not in out


def _keys(**keys: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | keys))

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_keys(model_type="lama"), "m/config.json: model_type: 'lama' is neither one of"),
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
