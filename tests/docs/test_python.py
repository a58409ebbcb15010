"""The Python of the documentation: every block compiles; those of docs/library.md run on a small model."""

import copy
import functools
import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune import linear, models
from tests.helpers.docs_pages import PAGES, ROOT, Block, blocks
from tests.helpers.each import holds_for_each

LIBRARY = ROOT / "docs" / "library.md"


def check_syntax(block: Block) -> None:
    text = textwrap.dedent(block.text).replace(", …)", ")").replace("…", "...")
    compile(text, block.place, "exec")


def test_every_block_compiles() -> None:
    shown = [block for page in PAGES for block in blocks(page, "python")]
    holds_for_each(shown, check_syntax, name=lambda block: block.place)


def section(heading: str) -> str:
    """The Python under a heading of library.md; "" is the text before the first."""
    text = LIBRARY.read_text(encoding="utf-8")
    start = text.index(f"\n## {heading}\n") if heading else 0
    first = text.count("\n", 0, start)
    end = text.find("\n## ", start + 1)
    last = text.count("\n", 0, end) if end > 0 else text.count("\n")
    return "".join(each.text for each in blocks(LIBRARY, "python") if first < each.line <= last + 1)


@functools.cache
def _model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**models.PRESETS["llama3_1"]["tiny"]))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has before the blocks: a model of transformers, batches, rows."""
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))
    return {
        "model": copy.deepcopy(_model()),
        "batches": [tokens[:4], tokens[4:]],
        "rows": [{"input_ids": row, "labels": row} for row in tokens],
        "linear": linear,
        "torch": torch,
    }


def test_the_loop_of_the_library_page_trains_and_verifies(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = copy.deepcopy(names["model"].state_dict())
    exec(compile(section("") + section("Your own loop"), LIBRARY.name, "exec"), names)
    assert "verified: 42 8-bit GEMMs ran in the first step, as planned" in capsys.readouterr().out
    after = names["model"].state_dict()
    assert list(after) == list(before)
    assert not torch.equal(
        after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_trainer_of_the_library_page_trains_and_verifies(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(section("transformers' Trainer"), LIBRARY.name, "exec"), names)
    assert "GEMMs ran in the first step, as planned" in capsys.readouterr().out


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="Lightning is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_fabric_of_the_library_page_trains_and_verifies(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(section("Lightning and Fabric"), LIBRARY.name, "exec"), names)
    assert "GEMMs ran in the first step, as planned" in capsys.readouterr().out
