"""The optimizer of docs/resume.md trains in a copy of the recipe, skips steps, resumes and is planned."""

import re
from pathlib import Path

import pytest
import torch

from lptune import training
from lptune.cli import catalog
from lptune.config import DataConfig, FinetuneConfig, ModelConfig
from lptune.models import PRESETS, config_from_dict
from lptune.plan import dry_run, memory
from tests.recipes.conftest import Run, read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "resume.md").read_text(encoding="utf-8")
OUR_OPTIMIZER = "optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)"
OUR_LOSS = "loss = batch_loss(model, batch, world, step.loss_factor)\n"


def documented() -> tuple[str, str]:
    """The class and the line that makes it, as the page has them."""
    (snippet,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class Momentum" in text)
    cls, line = snippet.rsplit("\n\n\n", 1)
    return cls, line.strip()


def own_recipe(folder: Path) -> Path:
    """A copy of the recipe with this optimizer. The loss of its last rank is NaN in the steps 1 and 3."""
    cls, line = documented()
    text = catalog.recipes()["full_finetune"].read_text(encoding="utf-8")
    assert (text.count(OUR_OPTIMIZER), text.count(OUR_LOSS)) == (1, 2)
    spoilt = "loss * (float('nan') if steps.num_done in (0, 2) and world.rank == world.size - 1 else 1)"
    text = text.replace(OUR_OPTIMIZER, line)
    text = text.replace(OUR_LOSS, f"{OUR_LOSS}{' ' * 16}loss = {spoilt}\n")
    path = folder / "own_optimizer.py"
    path.write_text(text.replace("def main(", f"{cls}\n\n\ndef main("), encoding="utf-8")
    return path


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_documented_optimizer_trains_skips_and_resumes_bitwise(
    num_ranks: int, run_recipe: Run, tmp_path: Path
) -> None:
    keys = ["num_steps=6", "eval_every_steps=0", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    keys += ["optimizer.lr=0.1", "precision.kind=int8_rowcol", "export.enabled=false"]
    recipe, whole, part = str(own_recipe(tmp_path)), tmp_path / "whole", tmp_path / "part"
    done = run_recipe(*keys, f"output_dir={whole}", recipe=recipe, ranks=num_ranks)
    assert done.stdout.count("Momentum does not read found_inf, so each update waits") == 1
    saved = whole / "checkpoints" / "step-00000002"
    run_recipe(*keys, f"output_dir={part}", f"resume={saved}", recipe=recipe, ranks=num_ranks)

    records = [record for record in read_metrics(whole) if "loss" in record]
    assert [record["num_skipped"] for record in records] == [1, 1, 2, 2, 2, 2]
    assert [record["loss"] is None for record in records] == [True, False, True, False, False, False]
    assert records[-1]["loss"] < records[1]["loss"] - 0.1
    resumed = [record["loss"] for record in read_metrics(part) if "loss" in record]
    assert resumed == [record["loss"] for record in records[2:]]


def test_the_dry_run_takes_the_documented_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = {"training": training, "torch": torch}
    exec(documented()[0], scope)
    monkeypatch.setattr(
        dry_run, "build_optimizer", lambda model, *_: scope["Momentum"](model.parameters(), momentum=0.9)
    )
    cfg = FinetuneConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=32),
        device="cpu",
        compile="none",
        micro_batch_size=1,
        global_batch_size=2,
    )
    found = dry_run.dry_run(cfg, config_from_dict(PRESETS["llama3_2"]["tiny"], "test"), world_size=2)
    assert found.resting[memory.OPTIMIZER] == found.resting[memory.PARAMETERS] > 0
