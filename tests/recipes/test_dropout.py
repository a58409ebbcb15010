"""A copied recipe with dropout: it acts in training alone, not in evaluations, samples and references."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lptune import training
from lptune.cli import catalog
from tests.helpers.tiny_recipe import write_config, write_preferences, write_rows
from tests.recipes.conftest import losses, read_lines, read_metrics, runner

DROPOUT = """\
        for block in model.model.layers:
            drop = torch.nn.functional.dropout
            block.register_forward_hook(lambda block, _, out, drop=drop: drop(out, 0.5, block.training))
"""


def _with_dropout(folder: Path, recipe: str) -> str:
    """A copy of the recipe that drops half of what each block of the model says."""
    text, after = catalog.recipes()[recipe].read_text("utf-8"), "        plan = linear.convert("
    assert text.count(after) == 1
    path = folder / f"{recipe}_with_dropout.py"
    path.write_text(text.replace(after, DROPOUT + after), encoding="utf-8")
    return str(path)


def _config(folder: Path, checkpoint: Path, source: Path) -> Path:
    return write_config(
        folder / "run.yaml", checkpoint, folder / "run",
        data={"source": str(source), "chat_template": "none", "seq_len": 192, "eval_fraction": 0.2},
        export={"enabled": False},
        num_steps=2, schedule={"warmup_steps": 1}, eval_every_steps=1, num_samples=4,
    )  # fmt: skip


def _at_start(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The evaluation before the first step, and its samples."""
    (row,) = (row for row in read_metrics(folder) if row["step"] == 0)
    samples = [sample for sample in read_lines(folder / "samples.jsonl") if sample["step"] == 0]
    return {key: value for key, value in row.items() if "eval" in key}, samples


def test_evaluations_references_and_samples_are_those_without_dropout(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_checkpoint, write_preferences(tmp_path / "rows.jsonl", 120))
    for name, recipe in (("plain", "full_dpo"), ("dropping", _with_dropout(tmp_path, "full_dpo"))):
        runner(recipe, config)(f"output_dir={tmp_path / name}")
    plain, found = _at_start(tmp_path / "plain"), _at_start(tmp_path / "dropping")
    assert found == plain
    assert len(plain[1]) == 4
    assert losses(tmp_path / "dropping")[0] != losses(tmp_path / "plain")[0]  # in training it acts


def test_a_recomputed_block_drops_in_backward_what_it_dropped_in_forward(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_checkpoint, write_rows(tmp_path / "rows.jsonl", 120))
    copy = Path(_with_dropout(tmp_path, "full_finetune"))
    # Of a part of a block: what hangs on the block itself is not recomputed.
    inside = copy.read_text("utf-8").replace("block.register_forward_hook", "block.mlp.register_forward_hook")
    copy.write_text(inside, encoding="utf-8")
    norms = []
    for mode in ("none", "selective", "full"):
        output = tmp_path / mode
        runner(str(copy), config)(f"activation_checkpointing={mode}", f"output_dir={output}")
        norms.append([row["grad_norm"] for row in read_metrics(output) if "grad_norm" in row])
    assert norms[0] == norms[1] == norms[2]


def test_checks_of_low_precision_compare_passes_without_dropout(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, tiny_checkpoint, write_rows(tmp_path / "rows.jsonl", 120))
    differences = []
    for recipe in ("full_finetune", _with_dropout(tmp_path, "full_finetune")):
        output = tmp_path / Path(recipe).stem
        keys = ("precision.kind=int8_rowcol", "precision.shadow_every=1", f"output_dir={output}")
        runner(recipe, config)(*keys, "num_steps=1")
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
