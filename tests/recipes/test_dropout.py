"""A copied recipe with dropout: it acts in training alone, not in evaluations, samples and references."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lptune import training
from lptune.cli import catalog
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config, write_labelled, write_preferences, write_texts
from tests.recipes.conftest import losses, read_metrics, runner

DROPOUT = """\
        for block in MODEL.model.layers:
            drop = torch.nn.functional.dropout
            block.register_forward_hook(lambda block, _, out, drop=drop: drop(out, 0.5, block.training))
"""


def _rows(path: Path, count: int) -> Path:
    rows = [{"prompt": f"say {i}", "response": f"{i % 7} is it"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


RECIPES: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any]]] = {
    "full_finetune": (_rows, {}),
    "full_dpo": (write_preferences, {}),
    "full_kto": (write_labelled, {}),
    "distill": (_rows, {}),
    "continued_pretrain": (write_texts, {}),
}


def _with_dropout(folder: Path, recipe: str, *models: str) -> Path:
    """A copy of the recipe that drops half of what each block of each of `models` says."""
    text = catalog.recipes()[recipe].read_text("utf-8")
    after = {"model": "        plan = linear.convert(", "teacher.model": "        optimizer = training."}
    for model in models:
        assert text.count(after[model]) == 1
        text = text.replace(after[model], DROPOUT.replace("MODEL", model) + after[model])
    path = folder / f"{recipe}_with_dropout.py"
    path.write_text(text, encoding="utf-8")
    return path


def _config(folder: Path, checkpoint: Path, recipe: str, **keys: Any) -> Path:
    write, more = RECIPES[recipe]
    if recipe == "distill":
        more = {"teacher": {"path": str(checkpoint)}, "distillation": {"labels": 0.0}}
    source = write(folder / "rows.jsonl", 120)
    return write_config(
        folder / "run.yaml", checkpoint, folder / "run",
        data={"source": str(source), "seq_len": 192, "eval_fraction": 0.2}, export={"enabled": False},
        num_steps=2, schedule={"warmup_steps": 1}, eval_every_steps=1, num_samples=4, **more, **keys,
    )  # fmt: skip


def _first(folder: Path) -> dict[str, Any]:
    """The evaluation before the first step."""
    return next(row for row in read_metrics(folder) if row["step"] == 0)


def _samples(folder: Path) -> list[dict[str, Any]]:
    path = folder / "samples.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [sample for sample in map(json.loads, lines) if sample["step"] == 0]


@pytest.mark.parametrize("recipe", slow_but(lambda recipe: recipe in ("full_finetune", "full_dpo"), RECIPES))
def test_evaluations_references_and_samples_are_those_without_dropout(
    tiny_checkpoint: Path, tmp_path: Path, recipe: str
) -> None:
    config = _config(tmp_path, tiny_checkpoint, recipe)
    runner(recipe, config)(f"output_dir={tmp_path / 'plain'}")
    dropping = runner(str(_with_dropout(tmp_path, recipe, "model")), config)
    dropping(f"output_dir={tmp_path / 'dropping'}")
    plain, found = _first(tmp_path / "plain"), _first(tmp_path / "dropping")
    assert {key: found[key] for key in plain if "eval" in key} == {
        key: plain[key] for key in plain if "eval" in key
    }
    assert len(_samples(tmp_path / "plain")) == 4
    assert _samples(tmp_path / "dropping") == _samples(tmp_path / "plain")
    assert losses(tmp_path / "dropping")[0] != losses(tmp_path / "plain")[0]  # in training it acts
    dropping(f"output_dir={tmp_path / 'unevaluated'}", "eval_every_steps=0", "data.eval_fraction=0.2")
    assert losses(tmp_path / "unevaluated") == losses(tmp_path / "dropping")  # after an evaluation, too


def test_a_recomputed_block_drops_in_backward_what_it_dropped_in_forward(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_checkpoint, "full_finetune")
    copy = _with_dropout(tmp_path, "full_finetune", "model")
    # Of a part of a block: what hangs on the block itself is not recomputed.
    inside = copy.read_text("utf-8").replace("block.register_forward_hook", "block.mlp.register_forward_hook")
    copy.write_text(inside, encoding="utf-8")
    norms = []
    for mode in ("none", "selective", "full"):
        output = tmp_path / mode
        runner(str(copy), config)(f"activation_checkpointing={mode}", f"output_dir={output}")
        norms.append([row["grad_norm"] for row in read_metrics(output) if "grad_norm" in row])
    assert norms[0] == norms[1] == norms[2]


def test_the_teacher_drops_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = _config(tmp_path, tiny_checkpoint, "distill")
    for name, recipe in (
        ("plain", "distill"),
        ("dropping", str(_with_dropout(tmp_path, "distill", "teacher.model"))),
    ):
        runner(recipe, config)(f"output_dir={tmp_path / name}")
    assert losses(tmp_path / "dropping") == losses(tmp_path / "plain")


def test_checks_of_low_precision_compare_passes_without_dropout(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_checkpoint, "full_finetune")
    differences = []
    for recipe in ("full_finetune", str(_with_dropout(tmp_path, "full_finetune", "model"))):
        output = tmp_path / Path(recipe).stem
        keys = ("precision.kind=int8_rowcol", "precision.shadow_every=1", f"output_dir={output}")
        runner(recipe, config)(*keys)
        differences.append(read_metrics(output)[1]["shadow_loss_difference"])  # before the first step
    assert differences[0] == differences[1]


def test_each_module_gets_back_the_mode_that_it_had() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Dropout())).train()
    model[1][0].eval()  # frozen by its user
    modes = [module.training for module in model.modules()]
    seen = []

    @training.evaluating
    def fails(model: nn.Module, what: str, *, why: str) -> None:
        seen.extend([any(module.training for module in model.modules()), torch.is_grad_enabled(), what, why])
        raise ValueError

    with pytest.raises(ValueError):
        fails(model, "what", why="why")
    assert seen == [False, False, "what", "why"]
    assert [module.training for module in model.modules()] == modes
