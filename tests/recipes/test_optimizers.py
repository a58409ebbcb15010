"""Each optimizer.kind through the command line: it learns, resumes bitwise, goes to other ranks and kinds."""

from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.config import FinetuneConfig, load_config
from tests.faults.state import digests, stored_tensors
from tests.recipes.conftest import Run, losses, read_metrics, refusal

KEYS = ("num_steps=6", "optimizer.lr=1e-3", "eval_every_steps=0", "precision.kind=int8_rowcol")
KEYS += ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "export.enabled=false")
KINDS = {
    "adamw_8bit": ("optimizer.kind=adamw_8bit",),
    "adamw_bf16": ("optimizer.kind=adamw_bf16", "optimizer.beta2=0.999"),
    "sgd": ("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.03"),
}


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_bitwise_also_after_a_part_on_two_ranks(
    kind: str, run_recipe: Run, tmp_path: Path
) -> None:
    keys = (*KEYS, *KINDS[kind])
    whole, part, two, back = (tmp_path / each for each in ("whole", "part", "two", "back"))
    run_recipe(*keys, f"output_dir={whole}")
    run_recipe(*keys, f"output_dir={part}", f"resume={checkpoint_of(whole, 3)}")
    ours, theirs = (digests(stored_tensors(checkpoint_of(run, 6))) for run in (part, whole))
    assert ours == theirs
    run_recipe(*keys, f"output_dir={two}", f"resume={checkpoint_of(whole, 2)}", ranks=2)
    run_recipe(*keys, f"output_dir={back}", f"resume={checkpoint_of(two, 4)}")
    # A gradient that is summed in another order may move an element to the next code of its moment. Measured:
    # 2.7e-6 at most.
    assert losses(two) == pytest.approx(losses(whole)[2:], rel=3e-5)
    assert losses(back) == pytest.approx(losses(whole)[4:], rel=3e-5)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_bf16"])
def test_it_learns_as_float32_adamw_does(kind: str, run_recipe: Run, tmp_path: Path) -> None:
    last = []
    for each in ("adamw", kind):
        run_recipe(f"optimizer.kind={each}", f"output_dir={tmp_path / each}", "export.enabled=false")
        records = read_metrics(tmp_path / each)
        last.append(records[-1]["eval_loss"])
        assert last[-1] < 0.8 * records[0]["eval_loss"]
    assert last[1] == pytest.approx(last[0], rel=2e-3)  # measured: 1.8e-4


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("adamw", "adamw_8bit", "moments that were in float32 are in 8 bits from here on, rounded once"),
        ("adamw_8bit", "adamw", "moments that were in 8 bits are in float32 from here on, the same values"),
        (
            "adamw_bf16",
            "adamw_8bit",
            "moments that were in bfloat16 are in 8 bits from here on, rounded once",
        ),
    ],
)
def test_another_kind_goes_on_with_the_moments_and_says_what_becomes_of_them(
    before: str, after: str, said: str, run_recipe: Run, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    run_recipe(*KEYS, f"optimizer.kind={before}", f"output_dir={first}")
    done = run_recipe(*KEYS, f"optimizer.kind={after}", f"resume={checkpoint_of(first, 3)}")
    assert f"note: step 3 was trained with optimizer.kind {before!r} (now {after!r})" in done.stdout
    assert f"note: {said}" in done.stdout
    # Measured: 1e-5 at most, and 0 in the first step, whose weights are those of the checkpoint.
    assert losses(tmp_path / "run") == pytest.approx(losses(first)[3:], rel=1e-4)


def test_a_kind_with_other_state_is_refused_before_anything_changes(run_recipe: Run, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_recipe(*KEYS, *KINDS["sgd"], f"output_dir={first}")
    done = run_recipe(*KEYS, f"resume={checkpoint_of(first, 3)}", code=2)
    assert "was saved with optimizer.kind=sgd, from whose state adamw cannot go on" in refusal(done)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["optimizer.momentum=0.9"], "optimizer.momentum: optimizer.kind=adamw does not have it"),
        (
            ["optimizer.kind=sgd", "optimizer.beta2=0.9"],
            "optimizer.beta2: optimizer.kind=sgd does not have it",
        ),
        (["optimizer.kind=sgd", "precision.kind=int8_weight_only"], "sgd does not round stochastically"),
        (["optimizer.kind=adamw8bit"], "'adamw8bit' is not one of .*; here that is adamw_8bit"),
        (["optimizer.kind=adamw_8bit", "optimizer.ema_decay=0.9"], "belongs to optimizer.kind=adamw, found"),
    ],
)
def test_what_cannot_be_is_refused(tiny_config: Path, keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(FinetuneConfig, tiny_config, keys)
