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
