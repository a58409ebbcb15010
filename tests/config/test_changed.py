"""A config with a few keys changed, as a file."""

from pathlib import Path

import pytest

from lptune.config import FinetuneConfig, load_config
from lptune.config.changed import changed_yaml

TEXT = """\
# A comment.
model: {path: here}
data: {source: rows.jsonl, seq_len: 2048}
precision: {kind: float8_rowwise}
optimizer: {lr: 1.0e-5}
output_dir: runs/x-${precision.kind}
"""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_file_has_what_differs_and_loads_as_the_changed_config(given: Path, tmp_path: Path) -> None:
    overrides = ["micro_batch_size=2", "seed=0", "data.template='{% if x %}'"][:2]
    changes = {"precision.kind": "int8_rowcol", "precision.skip": ("lm_head", "k_proj")}
    text = changed_yaml(FinetuneConfig, given, overrides, changes)
    assert text == (
        "model: {path: here}\n"
        "data: {source: rows.jsonl}\n"  # 2048 is the default
        "precision: {kind: int8_rowcol, skip: [lm_head, k_proj]}\n"
        "optimizer: {lr: 1.0e-05}\n"
        "output_dir: runs/x-${precision.kind}\n"
        "micro_batch_size: 2\n"  # seed=0 is the default
    )
    (tmp_path / "new.yaml").write_text(text, encoding="utf-8")
    new = load_config(FinetuneConfig, tmp_path / "new.yaml")
    arguments = [*overrides, "precision.kind=int8_rowcol", "precision.skip=[lm_head,k_proj]"]
    assert new == load_config(FinetuneConfig, given, arguments)
    assert new.output_dir == "runs/x-int8_rowcol"
