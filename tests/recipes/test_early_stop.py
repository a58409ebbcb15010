"""`early_stop_after`: where a run ends, what it exports, and that an interruption changes neither."""

import math
import shutil
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.checkpoint.retention import patience
from lptune.config import FinetuneConfig, load_config
from tests.recipes.conftest import Run, differing, evaluations, read_metrics, weights

# A rate at which the held-out loss falls first and then rises.
KEYS = (
    *("optimizer.lr=5e-2", "schedule.kind=constant", "num_steps=40", "eval_every_steps=1"),
    *("early_stop_after=2", "checkpoint.every_steps=1"),
)


def evaluation_losses(run: Path) -> dict[int, float]:
    """By step."""
    return {record["step"]: record["eval_loss"] for record in evaluations(run)}


def end_of(losses: dict[int, float], after: int) -> tuple[int, int]:
    """(the step at which a run with these losses ends, that of its best), step by step."""
    best, best_step, worse = math.inf, 0, 0
    for step, loss in losses.items():
        worse += 1
        if loss < best:
            best, best_step, worse = loss, step, 0
        if worse == after:
            return step, best_step
    raise AssertionError(f"these losses never end a run: {losses}")


def test_a_run_stops_early_exports_the_best_checkpoint_and_is_then_finished(
    run_recipe: Run, tmp_path: Path
) -> None:
    keys = (*KEYS, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    done = run_recipe(*keys)
    losses = evaluation_losses(tmp_path / "run")
    end, best = end_of(losses, after=2)
    assert 0 < best < end < 40, losses
    assert list(losses)[-1] == end == read_metrics(tmp_path / "run")[-1]["step"]
    why = f"2 evaluations without a lower eval_loss than that of step {best}\n"
    line = f"stopped early after step {end} of 40: {why}"
    assert line in done.stdout
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{best:08d}", f"step-{end:08d}"}
    assert f"compared with step-{best:08d})" in done.stdout
    exported = weights(tmp_path / "run" / "export")

    again = run_recipe(*keys)
    assert line in again.stdout
    assert "already finished: " in again.stdout
    assert "for more raise early_stop_after or change output_dir" in again.stdout

    # Killed before the export: the next launch trains nothing and exports the same.
    (tmp_path / "run" / "export.json").unlink()
    run_recipe(*keys)
    assert evaluation_losses(tmp_path / "run") == losses
    assert differing(weights(tmp_path / "run" / "export"), exported) == set()

    # With more patience the run goes on from its last step.
    more = run_recipe(*keys, "early_stop_after=3")
    assert f"continuing {tmp_path / 'run' / 'checkpoints' / f'step-{end:08d}'}" in more.stdout
    assert list(evaluation_losses(tmp_path / "run"))[-1] > end


def test_a_resumed_run_stops_where_an_uninterrupted_one_does(run_recipe: Run, tmp_path: Path) -> None:
    keys = (*KEYS, "checkpoint.keep_last=9")
    run_recipe(*keys)
    losses, exported = evaluation_losses(tmp_path / "run"), weights(tmp_path / "run" / "export")
    end, best = end_of(losses, after=2)
    assert best < end - 1
    checkpoints = tmp_path / "run" / "checkpoints"
    # As if killed after the last evaluation, before its checkpoint: the first worse evaluation is behind the
    # checkpoint, the one that ends the run is not, although metrics.jsonl has both.
    shutil.rmtree(checkpoints / f"step-{end:08d}")
    shutil.rmtree(tmp_path / "run" / "export")
    done = run_recipe(*keys)
    assert f"continuing {checkpoints / f'step-{end - 1:08d}'}" in done.stdout
    assert evaluation_losses(tmp_path / "run") == losses
    # Without keep_best it is the last step that is exported.
    assert f"compared with step-{end:08d})" in done.stdout
    assert differing(weights(tmp_path / "run" / "export"), exported) == set()


def test_patience_counts_from_the_best_and_takes_no_loss_that_is_not_finite() -> None:
    assert patience({}) == (0, 0)
    assert patience({0: 3.0, 5: 2.0, 10: 2.0, 15: None, 20: 2.5}) == (5, 3)
    assert patience({10: 1.0, 0: 3.0, 5: 2.0}) == (10, 0)
    assert patience({0: None, 5: None}) == (0, 2)


def test_it_needs_evaluations(tiny_config: Path) -> None:
    for key in ("data.eval_fraction=0", "eval_every_steps=0"):
        with pytest.raises(UserError, match=r"early_stop_after: needs evaluations; set data\.eval_fraction"):
            load_config(FinetuneConfig, tiny_config, ["early_stop_after=1", key])
