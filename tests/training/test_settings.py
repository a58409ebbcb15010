"""Notes before the first step: on what is legal and rarely meant."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lptune.config import FinetuneConfig, load_config
from lptune.training.settings import _notes

MODEL: Any = SimpleNamespace(facts=SimpleNamespace(max_position_embeddings=4096))


@pytest.fixture
def cfg(tmp_path: Path) -> FinetuneConfig:
    """A config with nothing to note."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: m}\ndata: {source: r.jsonl, eval_fraction: 0.1}\nprecision: {kind: int8_rowcol}\n"
    )
    return load_config(FinetuneConfig, path, [])


def test_what_is_usual_gets_no_note(cfg: FinetuneConfig) -> None:
    assert _notes(MODEL, cfg, 6) == []
    assert _notes(MODEL, replace(cfg, num_steps=2), 2) == [], "two steps were asked for"


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ("data", {"seq_len": 8192}, "data.seq_len=8192 is longer than .* 4096"),
        ("data", {"eval_fraction": 0.0}, "no held-out data will show overfitting; data.eval_fraction=0.02"),
        ("schedule", {"kind": "wsd", "decay_steps": 1}, "schedule.decay_steps=1 never lowers the rate"),
        ("precision", {"kind": "none"}, "precision.kind=none trains in bfloat16; `lptune advise` tells"),
    ],
)
def test_what_is_rarely_meant_gets_one(
    cfg: FinetuneConfig, section: str, keys: dict[str, Any], words: str
) -> None:
    (note,) = _notes(MODEL, replace(cfg, **{section: replace(getattr(cfg, section), **keys)}), 100)
    assert re.search(words, note), note


def test_few_steps_by_few_data_are_noted(cfg: FinetuneConfig) -> None:
    (note,) = _notes(MODEL, cfg, 1)
    assert note.startswith("this run has 1 step in all: num_epochs=1 in batches of 32 rows; lower")
    (note,) = _notes(MODEL, replace(cfg, num_epochs=2), 5)
    assert note.startswith("this run has 5 steps in all: num_epochs=2")


def test_other_data_to_evaluate_on_is_held_out_data(cfg: FinetuneConfig) -> None:
    data = replace(cfg.data, eval_fraction=0.0, eval_source="other.jsonl")
    assert _notes(MODEL, replace(cfg, data=data), 100) == []


def test_an_export_whose_template_was_not_trained_is_noted(cfg: FinetuneConfig, tmp_path: Path) -> None:
    untrained = replace(
        cfg, data=replace(cfg.data, chat_template="none"), model=replace(cfg.model, path=str(tmp_path))
    )
    assert _notes(MODEL, untrained, 100) == [], "the checkpoint has no template"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (note,) = _notes(MODEL, untrained, 100)
    assert "prompts.chat_template=none" in note
