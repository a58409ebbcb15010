"""`early_stop_after`: where a run ends, what it exports, and that an interruption changes neither."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lptune.base.errors import UserError
from lptune.checkpoint.retention import patience
from lptune.config import FinetuneConfig, load_config
from tests.helpers.tiny_recipe import (
    write_config,
    write_labelled,
    write_preferences,
    write_rows,
    write_texts,
)
from tests.recipes.conftest import Run, read_metrics

# A rate at which the held-out loss falls first and then rises.
KEYS = (
    "optimizer.lr=5e-2",
    "schedule.kind=constant",
    "num_steps=40",
    "eval_every_steps=1",
    "early_stop_after=2",
)


def _evaluations(run: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in read_metrics(run) if "eval_loss" in record}


def _end_of(losses: dict[int, float], after: int) -> tuple[int, int]:
    """(the step at which a run with these losses ends, that of its best), step by step."""
    best, best_step, worse = math.inf, 0, 0
    for step, loss in losses.items():
        worse += 1
        if loss < best:
            best, best_step, worse = loss, step, 0
        if worse == after:
            return step, best_step
    raise AssertionError(f"these losses never end a run: {losses}")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_stops_early_exports_the_best_checkpoint_and_is_then_finished(
    run_recipe: Run, tmp_path: Path
) -> None:
    keys = (*KEYS, "checkpoint.every_steps=1", "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    done = run_recipe(*keys)
    losses = _evaluations(tmp_path / "run")
    end, best = _end_of(losses, after=2)
    assert 0 < best < end < 40, losses
    assert list(losses)[-1] == end == read_metrics(tmp_path / "run")[-1]["step"]
    why = f"2 evaluations without a lower eval_loss than that of step {best}\n"
    line = f"stopped early after step {end} of 40: {why}"
    assert line in done.stdout
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{best:08d}", f"step-{end:08d}"}
    assert f"compared with step-{best:08d})" in done.stdout
    exported = _weights(tmp_path / "run" / "export")

    again = run_recipe(*keys)
    assert line in again.stdout
    assert "already finished: " in again.stdout
    assert "for more raise early_stop_after or change output_dir" in again.stdout

    # Killed before the export: the next launch trains nothing and exports the same.
    (tmp_path / "run" / "export.json").unlink()
    run_recipe(*keys)
    assert _evaluations(tmp_path / "run") == losses
    assert _equal(_weights(tmp_path / "run" / "export"), exported)

    # With more patience the run goes on from its last step.
    more = run_recipe(*keys, "early_stop_after=3")
    assert f"continuing {tmp_path / 'run' / 'checkpoints' / f'step-{end:08d}'}" in more.stdout
    assert list(_evaluations(tmp_path / "run"))[-1] > end


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(
    run_recipe: Run, tmp_path: Path, ranks: int
) -> None:
    keys = (*KEYS, "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    run_recipe(*keys, ranks=ranks)
    losses, exported = _evaluations(tmp_path / "run"), _weights(tmp_path / "run" / "export")
    end, best = _end_of(losses, after=2)
    assert best < end - 1
    checkpoints = tmp_path / "run" / "checkpoints"
    # As if killed after the last evaluation, before its checkpoint: the first worse evaluation is behind the
    # checkpoint, the one that ends the run is not, although metrics.jsonl has both.
    shutil.rmtree(checkpoints / f"step-{end:08d}")
    shutil.rmtree(tmp_path / "run" / "export")
    done = run_recipe(*keys, ranks=ranks)
    assert f"continuing {checkpoints / f'step-{end - 1:08d}'}" in done.stdout
    assert _evaluations(tmp_path / "run") == losses
    # Without keep_best it is the last step that is exported.
    assert f"compared with step-{end:08d})" in done.stdout
    assert _equal(_weights(tmp_path / "run" / "export"), exported)


def test_patience_counts_from_the_best_and_takes_no_loss_that_is_not_finite() -> None:
    assert patience({}) == (0, 0)
    assert patience({0: 3.0, 5: 2.0, 10: 2.0, 15: None, 20: 2.5}) == (5, 3)
    assert patience({10: 1.0, 0: 3.0, 5: 2.0}) == (10, 0)
    assert patience({0: None, 5: None}) == (0, 2)


def test_it_needs_evaluations(tiny_config: Path) -> None:
    for key in ("data.eval_fraction=0", "eval_every_steps=0"):
        with pytest.raises(
            UserError, match=r"^.*early_stop_after: needs evaluations; set data\.eval_fraction"
        ):
            load_config(FinetuneConfig, tiny_config, ["early_stop_after=1", key])


DATA: dict[str, Callable[[Path, int], Path]] = {
    "full_finetune": write_rows,
    "continued_pretrain": write_texts,
    "full_dpo": write_preferences,
    "full_kto": write_labelled,
    "distill": write_rows,
}


@pytest.mark.parametrize("recipe", DATA)
def test_each_recipe_stops_early_averages_its_weights_and_shows_samples(
    recipe: str, run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    source = DATA[recipe](tmp_path / "rows.jsonl", 160)
    data = {"source": str(source), "seq_len": 192, "eval_fraction": 0.2}
    more = {"teacher": {"path": str(tiny_checkpoint)}} if recipe == "distill" else {}
    config = write_config(tmp_path / "own.yaml", tiny_checkpoint, tmp_path / "own", data=data, **more)
    keys = (*KEYS, "early_stop_after=1", "optimizer.ema_decay=0.5", "num_samples=3", "optimizer.lr=0.5")
    done = run_recipe(*keys, config=config, recipe=recipe)
    end, _ = _end_of(_evaluations(tmp_path / "own"), after=1)
    assert f"stopped early after step {end} of 40: 1 evaluations without" in done.stdout
    assert f"compared with the moving averages in step-{end:08d})" in done.stdout
    lines = (tmp_path / "own" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert [(each["step"], each["when"]) for each in samples] == [
        *[(0, "before training")] * 3,
        *[(end, "after training")] * 3,
    ]
    assert len({each["prompt"] for each in samples}) == 3
    # What was rejected, or labelled undesirable, is no reference.
    assert not any(each["reference"].startswith("Sorry") for each in samples)
