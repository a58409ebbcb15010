"""One row of the matrix of model types (all: `make test-models`), and that its cells can fail."""

import importlib
from pathlib import Path
from unittest import mock

import pytest

from lptune.models.hf.model import HFModel
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_recipe import make_checkpoint
from tests.proofs import models_matrix


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "tokenizer")


def _on_a_rank_that_computes_something_else(rank: int, num_ranks: int, base: str, folder: str) -> None:
    body = HFModel.body
    with mock.patch.object(HFModel, "body", lambda *args: body(*args) * (1 + 1e-4 * rank)):
        models_matrix.on_rank(rank, num_ranks, base, folder)


@pytest.mark.slow  # `make test-models` runs all rows; the suite packs and trains each type (models/hf)
def test_a_row_holds_and_a_rank_that_differs_is_found(base: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Latent attention, routers with constants, experts that are stored one by one."""
    outcome = models_matrix.run("deepseek_v3", base, tmp_path / "row", ranks)
    assert not outcome.failures
    assert set(outcome.cells) == set(models_matrix.COLUMNS)
    assert outcome.built_by == "transformers"
    assert any("parallel.tensor" in line for line in outcome.refused)
    folder = tmp_path / "row"
    (folder / "int8_rowcol-2").rename(folder / "right")
    ranks.run(_on_a_rank_that_computes_something_else, 2, str(folder / "base"), str(folder))
    with pytest.raises(AssertionError, match="differs by"):
        models_matrix.compared_gradients(folder)


def test_a_weight_without_a_line_in_the_plan_is_a_failed_cell(
    base: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lptune.linear.convert"), "_others", lambda *_, **__: ())
    outcome = models_matrix.run("qwen3_moe", base, tmp_path / "row", ranks, ["plan", "loaded"])
    assert outcome.failures.keys() == {"plan"}
    assert "not in the plan: model.layers.0.mlp.gate.weight" in outcome.failures["plan"]


def test_the_section_alone_is_replaced() -> None:
    title = models_matrix.TITLE
    page = f"# Models\n\n{title}\n\noutdated\n\n## Next\n\nend\n"
    outcome = models_matrix.Outcome("lptune", {"plan": "1 of 2"}, {"export": "ValueError: no"}, ["no"])
    text = models_matrix.section({"llama": outcome}, "a test")
    found = models_matrix.put(page, text)
    assert found.startswith(f"# Models\n\n{title}\n")
    assert found.endswith("## Next\n\nend\n")
    assert "outdated" not in found
    assert "| `llama` | lptune | 1 of 2 | not run |" in found
    assert "- **llama**, export: ValueError: no" in found
    assert models_matrix.put(found, text) == found
