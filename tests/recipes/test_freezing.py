"""The key `freeze`: a frozen weight keeps its bits through training, checkpoint, resume and export."""

from pathlib import Path

import pytest

from lptune.checkpoint import verify
from tests.recipes.conftest import Run, differing, losses, refusal, weights

FREEZE = 'freeze=["embed_tokens", "layers.0", "*norm*"]'
SHORT = ("num_steps=3", "eval_every_steps=0", "schedule.warmup_steps=0")


def _is_frozen(name: str) -> bool:
    return "embed_tokens" in name or ".layers.0." in name or "norm" in name


@pytest.mark.parametrize(
    ("kind", "ranks", "keys"),
    [
        ("int8_rowcol", 2, ("compute_dtype=bfloat16",)),
        # The export of a resumed run of this kind is compared with its base below.
        pytest.param("int8_weight_only", 1, ("activation_checkpointing=full",), marks=pytest.mark.slow),
    ],
)
def test_frozen_weights_are_exported_bitwise_and_have_no_moments(
    run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path, kind: str, ranks: int, keys: tuple[str, ...]
) -> None:
    done = run_recipe(FREEZE, f"precision.kind={kind}", *SHORT, *keys, ranks=ranks)
    assert "frozen, without gradient and optimizer state: " in done.stdout
    base, exported = weights(tiny_checkpoint), weights(tmp_path / "run" / "export")
    trained = {name for name in base if not _is_frozen(name)}
    assert trained
    assert differing(base, exported) == trained
    saved = verify(tmp_path / "run" / "checkpoints" / "step-00000003").shards
    assert {name.partition("/")[2] for name in saved if name.startswith("exp_avg/")} == trained


def test_a_step_changes_the_other_weights_as_without_freezing(run_recipe: Run, tmp_path: Path) -> None:
    common = ("max_grad_norm=0", "num_steps=1", "eval_every_steps=0", "schedule.warmup_steps=0")
    run_recipe(*common, f"output_dir={tmp_path / 'whole'}")
    run_recipe(*common, f"output_dir={tmp_path / 'part'}", FREEZE)
    whole, part = (weights(tmp_path / name / "export") for name in ("whole", "part"))
    assert differing(whole, part) == {name for name in whole if _is_frozen(name)}


def test_a_resumed_run_continues_bitwise_and_may_change_what_is_frozen(
    run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    common = ("precision.kind=int8_weight_only", "schedule.kind=constant", "eval_every_steps=0")
    run_recipe(*common, FREEZE, "num_steps=4", f"output_dir={tmp_path / 'whole'}")
    run_recipe(*common, FREEZE, "num_steps=2", "checkpoint.keep_last=9")
    run_recipe(*common, FREEZE, "num_steps=4", "checkpoint.keep_last=9")
    exports = [weights(tmp_path / name / "export") for name in ("whole", "run")]
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    assert differing(*exports) == set()

    # Trained for two steps, then frozen: its weights are those of the checkpoint, not those of the base.
    run_recipe(*common, 'freeze=["layers.0.mlp"]', "num_steps=5", "checkpoint.keep_last=9")
    unfrozen = weights(tmp_path / "run" / "export")
    run_recipe(*common, FREEZE, "num_steps=7", "checkpoint.keep_last=9")
    frozen_again = weights(tmp_path / "run" / "export")
    base = weights(tiny_checkpoint)
    names = {name for name in base if _is_frozen(name)}
    mlp = {name for name in names if ".layers.0.mlp" in name}
    assert differing(base, unfrozen) & names == names - mlp
    assert differing(unfrozen, frozen_again) & names == set()


def test_a_pattern_without_a_match_ends_the_run_before_it_writes(run_recipe: Run, tmp_path: Path) -> None:
    said = refusal(run_recipe('freeze=["layer.0"]', code=2))
    assert "freeze: 'layer.0' matches no parameter (did you mean 'layers.0'?)" in said
    assert not (tmp_path / "run").exists()
