"""A copy of the recipe that draws random numbers and meets NaN: resumed bit for bit, ended where it must."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lptune import checkpoint
from lptune.base.errors import DivergedError
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import FinetuneConfig, load_config
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but
from tests.recipes.conftest import Run, read_metrics

OUR_LINE = "loss = batch_loss(model, batch, world, step.loss_factor)\n"
THEIR_LINE = "loss = batch_loss(model, dropped(batch), world) * spoilt(world)\n"
OUR_STEP = "        for step in steps:\n"
THEIR_STEP = OUR_STEP + "            spoilt.step = steps.num_done\n"
THEIR_FUNCTIONS = '''

def dropped(batch):
    """Word dropout, by all the generators that a recipe may draw from."""
    import random
    import numpy
    drop_BS = torch.rand(batch.tokens_BS.shape) < 0.2
    instead = random.randrange(100) + int(numpy.random.randint(100))
    return batch._replace(tokens_BS=torch.where(drop_BS, instead, batch.tokens_BS))


def spoilt(world):
    """NaN on the last rank in these steps, counted from 0."""
    return float("nan") if spoilt.step in {steps} and world.rank == world.size - 1 else 1.0
'''


def _copied(folder: Path, *spoilt_steps: int) -> Path:
    """A user's copy of the recipe."""
    text = catalog.recipes()["full_finetune"].read_text(encoding="utf-8")
    assert text.count(OUR_LINE) == 2 * text.count(OUR_STEP) == 2
    path = folder / f"my_recipe_{'_'.join(map(str, spoilt_steps))}.py"
    functions = THEIR_FUNCTIONS.replace("{steps}", str(spoilt_steps))
    text = text.replace(OUR_LINE, THEIR_LINE).replace(OUR_STEP, THEIR_STEP)
    path.write_text(text + functions, encoding="utf-8")
    return path


def _run(rank: int, num_ranks: int, recipe: Path, config: Path, overrides: list[str]) -> str:
    """The recipe's main; returns what a DivergedError said, or nothing."""
    main = load_main(recipe)
    with redirect_stdout(StringIO()):
        try:
            main(load_config(FinetuneConfig, config, overrides))
        except DivergedError as error:
            return str(error)
    return ""


def _state(folder: Path) -> dict[str, Any]:
    """All of a checkpoint, the tensors that each rank wrote and state.json."""
    files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Any] = {f"{file.name}/{k}": t for file in files for k, t in load_file(file).items()}
    return tensors | {"state.json": json.loads((folder / "state.json").read_text(encoding="utf-8"))}


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


TRAINED = ("loss", "grad_norm", "lr", "num_target_tokens", "num_skipped", "eval_loss")


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    slow_but(
        lambda kind, _: kind == "float8_delayed",  # scales are state, too
        [("none", 1), ("int8_rowcol", 2), ("float8_delayed", 2), ("int8_weight_only", 1), ("nvfp4", 2)],
    ),
)
def test_a_recipe_with_dropout_and_skipped_steps_resumes_bit_for_bit(
    kind: str, num_ranks: int, ranks: Ranks, tmp_path: Path, tiny_config: Path
) -> None:
    recipe = _copied(tmp_path, 1, 2, 4)
    keys = [f"precision.kind={kind}", f"precision.emulate={str(kind == 'float8_delayed').lower()}"]
    keys += ["precision.stochastic_rounding=true"] if kind == "int8_rowcol" else []
    keys += ["checkpoint.every_steps=2", "checkpoint.keep_last=9", "num_steps=6", "eval_every_steps=3"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    ranks.run(_run, num_ranks, recipe, tiny_config, [*keys, f"output_dir={whole}"])
    # Two steps were skipped before step 4, one comes after it.
    saved = whole / "checkpoints" / "step-00000004"
    ranks.run(_run, num_ranks, recipe, tiny_config, [*keys, f"output_dir={part}", f"resume={saved}"])

    expected = [{key: record.get(key) for key in TRAINED} for record in read_metrics(whole)]
    assert [record["num_skipped"] for record in expected[1:]] == [0, 1, 2, 2, 3, 3]
    assert [record["loss"] is None for record in expected[1:]] == [False, True, True, False, True, False]
    actual = [{key: record.get(key) for key in TRAINED} for record in read_metrics(part)]
    assert actual == expected[-2:]
    last = [folder / "checkpoints" / "step-00000006" for folder in (whole, part)]
    _assert_equal(_state(last[0]), _state(last[1]))
    for path in (saved, *last):
        assert checkpoint.verify(path).step == int(path.name[5:])


def test_a_save_that_was_due_at_a_skipped_step_is_made_up_for(
    ranks: Ranks, tmp_path: Path, tiny_config: Path
) -> None:
    keys = ["checkpoint.every_steps=3", "checkpoint.keep_last=9", "num_steps=6", "eval_every_steps=0"]
    ranks.run(_run, 1, _copied(tmp_path, 2, 3), tiny_config, keys)  # steps 3 and 4
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000005", "step-00000006"]


def test_what_a_copied_recipe_draws_is_in_its_losses(ranks: Ranks, tmp_path: Path, tiny_config: Path) -> None:
    keys = ["num_steps=1", "eval_every_steps=0"]
    for name, recipe in (("ours", catalog.recipes()["full_finetune"]), ("theirs", _copied(tmp_path, 9))):
        ranks.run(_run, 1, recipe, tiny_config, [*keys, f"output_dir={tmp_path / name}"])
    ours, theirs = (read_metrics(tmp_path / name)[0]["loss"] for name in ("ours", "theirs"))
    assert ours != theirs


def test_so_many_steps_in_a_row_end_the_run_and_name_the_newest_checkpoint(
    ranks: Ranks, tmp_path: Path, tiny_config: Path
) -> None:
    recipe, run = _copied(tmp_path, 1, 3, 4, 5), tmp_path / "run"
    newest = run / "checkpoints" / "step-00000003"
    keys = ["checkpoint.every_steps=1", "checkpoint.keep_last=2", "num_steps=8", "eval_every_steps=0"]
    for message in ranks.run(_run, 2, recipe, tiny_config, keys):
        assert message.startswith("diverged at step 6: loss nan, gradient norm nan, not finite for 3 steps")
        assert f"the weights are still those of step 3, and the newest checkpoint is {newest}." in message
    assert [record["num_skipped"] for record in read_metrics(run)] == [0, 1, 1, 2, 3, 4]
    # Checkpoints of skipped steps would have driven it out.
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-00000001", newest.name]
    assert checkpoint.verify(newest).step == 3
    again = ranks.run(_run, 2, recipe, tiny_config, keys)
    assert again[0] == message
    assert not (run / "export").exists()


def test_a_diverged_run_exits_with_3_and_one_line(run_recipe: Run, tmp_path: Path) -> None:
    done = run_recipe(
        "diverged_after_steps=1",
        "num_steps=4",
        "eval_every_steps=0",
        code=3,
        recipe=str(_copied(tmp_path, 0)),
    )
    assert done.stderr.startswith("error: diverged at step 1: loss nan, gradient norm nan, not finite; ")
    assert "those of step 0, and there is no checkpoint. The same config would end here again" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "step 1/4  loss nan" in done.stdout
