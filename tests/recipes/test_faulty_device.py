"""A device that begins to multiply wrongly while a run trains: what it has spoilt is not saved."""

from pathlib import Path

from lptune.cli import catalog
from tests.recipes.conftest import Run

FAULT = '''
import os

from lptune.distributed import same_products

_sound, _calls = same_products.product, []


def _faulty(device):
    """Of rank 1, from the third look on: before the run, at step 4, at step 8."""
    _calls.append(device)
    digest, milliseconds = _sound(device)
    return digest ^ (os.environ["RANK"] == "1" and len(_calls) > 2), milliseconds


same_products.product = _faulty
'''


def test_the_run_ends_before_the_checkpoint_and_names_the_steps_that_are_lost(
    run_recipe: Run, tmp_path: Path
) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(catalog.recipes()["full_finetune"].read_text(encoding="utf-8") + FAULT)
    done = run_recipe(
        "num_steps=9", "eval_every_steps=0", "checkpoint.every_steps=4", recipe=str(recipe), ranks=2, code=2
    )
    assert "an exact product of INT8 matrices has other bits" in done.stderr
    assert "what was trained after step 4 is not saved" in done.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004"]
