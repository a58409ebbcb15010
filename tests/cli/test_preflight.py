"""What the launcher says before torch is imported, the library says in the same words."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lptune import distributed, linear
from lptune.cli import preflight
from lptune.config import FinetuneConfig, UserError, load_config


def _config(folder: Path, *overrides: str) -> FinetuneConfig:
    (folder / "c.yaml").write_text(f"model: {{path: {folder}}}\ndata: {{source: builtin}}\n")
    return load_config(FinetuneConfig, folder / "c.yaml", overrides)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_may_have_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)


def test_float8_on_a_cpu_is_refused_in_the_words_of_the_conversion(tmp_path: Path) -> None:
    cfg = _config(tmp_path, "device=cpu", "precision.kind=float8_rowwise")
    with pytest.raises(UserError) as early:
        preflight.check(cfg, 1)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UserError, match="and cpu here has none") as late:
        linear.convert(model, cfg.precision, device=torch.device("cpu"))
    assert str(early.value) == str(late.value)


def test_a_gpu_that_is_not_there_is_refused_as_by_the_session(tmp_path: Path) -> None:
    with pytest.raises(UserError) as early:
        preflight.check(_config(tmp_path, "device=cuda"), 1)
    with pytest.raises(UserError) as late, distributed.session("cuda"):
        pass
    found = "this machine has no GPU", "torch sees no CUDA device"
    assert str(early.value).replace(found[0], found[1]) == str(late.value)


@pytest.mark.parametrize("key", ["data.source", "data.eval_source"])
def test_every_source_of_a_list_must_be_there(tmp_path: Path, key: str) -> None:
    (tmp_path / "shards").mkdir()
    listed = f"[builtin, owner/set, {{source: {tmp_path}/shards, format: text}}, '{tmp_path}/*.csv']"
    cfg = _config(tmp_path, "device=cpu", f"{key}={listed}")
    for name, missing in (
        ("shards/a.jsonl", "shards: is a folder without"),
        ("b.csv", r"\*.csv: there is no"),
    ):
        with pytest.raises(UserError, match=rf"{missing}.* {key}"):
            preflight.check(cfg, 1)
        (tmp_path / name).write_text("")
    preflight.check(cfg, 1)
