"""optimizer.in_backward through the command line: the same bits in every recipe, resumes, other ranks."""

from pathlib import Path

import pytest

from tests.faults.state import digests, stored_tensors
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import Run, losses, read_metrics, refusal, runner
from tests.recipes.test_every_recipe import RECIPES
from tests.recipes.test_optimizers import KINDS, checkpoint_of

KEYS = ("optimizer.in_backward=true", "num_steps=6", "optimizer.lr=1e-3", "eval_every_steps=0")
KEYS += (*KINDS["adamw_8bit"], "max_grad_norm=0.5", "micro_batch_size=8")
KEYS += ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "export.enabled=false")


def test_a_run_is_resumed_bitwise(run_recipe: Run, tmp_path: Path) -> None:
    """On other ranks: its state is that of the same optimizer without it, test_optimizers.py."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    said = run_recipe(*KEYS, f"output_dir={whole}").stdout
    assert "note: max_grad_norm=0.5 clips by the gradient norm of the step before" in said
    assert " for weights and the optimizer; activations and the gradients of a block on top" in said
    norms = [record["grad_norm"] for record in read_metrics(whole)]
    assert all(norm > 0.5 for norm in norms)  # each step but the first is clipped
    run_recipe(*KEYS, f"output_dir={part}", f"resume={checkpoint_of(whole, 3)}")
    ours, theirs = (digests(stored_tensors(checkpoint_of(run, 6))) for run in (part, whole))
    assert ours == theirs


@pytest.mark.parametrize(
    "recipe",
    # full_kto, with a pass before each step, stands for the others.
    [pytest.param(each, marks=[] if each == "full_kto" else pytest.mark.slow) for each in RECIPES],
)
def test_each_recipe_trains_the_same_bits(recipe: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    write, more = RECIPES[recipe]
    teacher = {"teacher": {"path": str(tiny_checkpoint)}} if recipe == "distill" else {}
    data = {"source": str(write(tmp_path / "rows.jsonl", 160)), "chat_template": "none", "seq_len": 192}
    precision = {"kind": "int8_rowcol", "shadow_every": 1}
    config = write_config(
        tmp_path / "own.yaml", tiny_checkpoint, tmp_path / "run", data=data, precision=precision,
        num_steps=2, max_grad_norm=0, micro_batch_size=8, **more, **teacher,
    )  # fmt: skip
    run, folders = runner(recipe, config), {each: tmp_path / each for each in ("false", "true")}
    for each, folder in folders.items():
        run(f"optimizer.in_backward={each}", f"output_dir={folder}")
    after, within = (digests(stored_tensors(checkpoint_of(each, 2))) for each in folders.values())
    assert within == after
    assert losses(folders["true"]) == losses(folders["false"])


def test_more_micro_batches_are_refused_before_anything_changes(run_recipe: Run, tmp_path: Path) -> None:
    done = run_recipe("optimizer.in_backward=true", code=2)
    assert "a rank has 4 in a step; set global_batch_size=2 or micro_batch_size=8, or" in refusal(done)
    assert not (tmp_path / "run").exists()
