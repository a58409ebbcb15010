"""The recipe on meshes of more than one axis, and from one mesh to another."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.conftest import Run, evaluations, losses, read_metrics

INT8 = ("precision.kind=int8_rowcol", "precision.grad_weight=folded", "eval_every_steps=0")


def test_a_run_goes_on_under_tensor_parallelism_and_ends_on_one_rank(run_recipe: Run, tmp_path: Path) -> None:
    """Two steps each on one rank, on 2 x 2, on one again; beside six on one."""
    run_recipe(*INT8, "num_steps=6", "schedule.kind=constant", f"output_dir={tmp_path / 'alone'}")
    meshes = ((1, ()), (4, ("parallel.tensor=2", "precision.tp_all_gather=low", "num_samples=2")), (1, ()))
    outputs = [
        run_recipe(*INT8, *keys, f"num_steps={2 * (i + 1)}", "schedule.kind=constant", ranks=ranks).stdout
        for i, (ranks, keys) in enumerate(meshes)
    ]
    assert "4 x cpu (fsdp 2 x tensor 2), activations gathered: 1 x high, 4 x int8 rows" in outputs[1]
    # One for q, k, v and one for gate, up, in each of two blocks, for each of a data rank's two batches of
    # 2 x 128 tokens of 16 + 64 bytes.
    assert f"all_gather over tensor uint8 8 x, {8 * 2 * 128 * (16 + 64) / 1e3:.1f} kB" in outputs[1]
    actual, expected = losses(tmp_path / "run"), losses(tmp_path / "alone")
    assert actual[:2] == expected[:2]
    # From the third step on row-parallel weights have a scale for each half of a row: other roundings.
    assert actual == pytest.approx(expected, rel=5e-3)
    assert actual[2:] != expected[2:]
    ours, theirs = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("run", "alone"))
    for name, tensor in theirs.items():
        # Six steps of AdamW move an element by about six times the learning rate, whatever the sign.
        assert ours[name].shape == tensor.shape
        assert (ours[name].float() - tensor.float()).abs().max() < 2 * 6 * 3e-3
        assert not torch.equal(ours[name], tensor)


@pytest.mark.slow  # two steps of each recipe beside one rank: test_every_recipe.py
def test_a_run_goes_on_with_rows_that_ranks_share_and_ends_on_one_rank(
    run_recipe: Run, tmp_path: Path
) -> None:
    """Two steps each on one rank, on two pairs of ranks, on one again; beside six on one."""
    keys = ("precision.kind=none", "compute_dtype=float32", "eval_every_steps=2", "schedule.kind=constant")
    run_recipe(*keys, "num_steps=6", f"output_dir={tmp_path / 'alone'}")
    meshes = ((1, ()), (4, ("parallel.context=2", "num_samples=2")), (1, ()))
    outputs = [
        run_recipe(*keys, *more, f"num_steps={2 * (i + 1)}", ranks=ranks).stdout
        for i, (ranks, more) in enumerate(meshes)
    ]
    assert "4 x cpu, each row on 2 of them" in outputs[1]
    assert "all_to_all over context float32" in outputs[1]
    # Sums in another order; no bound follows from that after several steps. Measured: 1e-7.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    held_out = [[each["eval_loss"] for each in evaluations(tmp_path / name)] for name in ("run", "alone")]
    assert len(held_out[0]) >= 3
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-6)
    counts = [[each["num_target_tokens"] for each in read_metrics(tmp_path / name) if "loss" in each]
              for name in ("run", "alone")]  # fmt: skip
    assert counts[0] == counts[1]
