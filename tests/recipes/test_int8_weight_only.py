"""A run whose weights are stored in INT8, through the command line."""

import json
from pathlib import Path

import pytest
import torch

from lptune import checkpoint, linear, models, training
from lptune.config import OptimizerConfig, PrecisionConfig
from tests.recipes.conftest import Run, losses, read_metrics

KIND = "precision.kind=int8_weight_only"


def test_it_learns_says_what_ran_and_exports_what_transformers_computes_alike(
    run_recipe: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    done = run_recipe(KIND, "export.dtype=float32")
    assert "GEMMs from 8-bit weights ran in the first step, as planned" in done.stdout
    assert "8-bit GEMMs by" not in done.stdout
    run = tmp_path / "run"
    records = read_metrics(run)
    assert records[12]["eval_loss"] < 0.8 * records[0]["eval_loss"]
    assert all(record["low_precision_flops_fraction"] == 0.0 for record in records[1:])
    plan = json.loads((run / "precision_plan.json").read_text(encoding="utf-8"))
    gathers = {layer["all_gather"] for layer in plan["layers"] if layer["reason"] is None}
    assert (plan["num_converted"], gathers) == (14, {"int8"})

    # The model as it was trained, from its last checkpoint, beside what transformers makes of the export.
    model = models.build_on_meta(models.read_config(run / "export"))
    linear.convert(model, PrecisionConfig(kind="int8_weight_only"))
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    manifest = checkpoint.verify(run / "checkpoints" / "step-00000012")
    checkpoint.load_state(manifest, model, training.build_optimizer(model, OptimizerConfig()))
    theirs = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        difference = (model(tokens) - theirs(tokens).logits).abs().max()
    assert difference <= 1e-4


@pytest.mark.slow  # a step of it beside one rank: distributed/test_tensor_parallel.py
def test_two_ranks_see_the_batches_of_one_and_reach_its_losses(run_recipe: Run, tmp_path: Path) -> None:
    for ranks in (1, 2):
        overrides = ("optimizer.lr=1e-3", "num_steps=4", f"output_dir={tmp_path / str(ranks)}")
        run_recipe(KIND, *overrides, ranks=ranks)
    one, two = read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2")
    assert [r["num_target_tokens"] for r in one[1:]] == [r["num_target_tokens"] for r in two[1:]]
    assert one[0]["eval_loss"] == pytest.approx(two[0]["eval_loss"], rel=1e-6)
    # Measured over 4 seeds: 1.1e-7 at most. Gradients summed in another order move a weight by a float32 ulp,
    # and one in 10**5 weights is then rounded to its other neighbour.
    assert one[1]["grad_norm"] == pytest.approx(two[1]["grad_norm"], rel=1e-5)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=2e-6)
