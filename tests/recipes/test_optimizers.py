"""Each optimizer.kind through the command line: it learns, resumes bitwise, goes to other ranks and kinds."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from lptune.base.errors import UserError
from lptune.config import FinetuneConfig, load_config
from tests.faults.state import digests, stored_tensors
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import Run, losses, read_metrics, refusal, runner

KEYS = ("num_steps=6", "optimizer.lr=1e-3", "eval_every_steps=0", "precision.kind=int8_rowcol")
KEYS += ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "export.enabled=false")
KINDS = {
    "adamw_8bit": ("optimizer.kind=adamw_8bit",),
    "adamw_bf16": ("optimizer.kind=adamw_bf16", "optimizer.beta2=0.999"),
    "master none": (
        *("optimizer.kind=adamw_8bit", "optimizer.master=none", "compute_dtype=bfloat16"),
        "global_batch_size=4",  # bfloat16 is slow where a processor emulates it
    ),
    "muon": ("optimizer.kind=muon",),
    "sgd": ("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.03"),
}


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


@pytest.fixture(scope="module")
def whole_of(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`whole_of("optimizer.kind=sgd")`: the folder of a finished run of these keys, made once."""

    @cache
    def run(*keys: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        config = write_config(folder / "tiny.yaml", tiny_checkpoint, folder / "run")
        runner("full_finetune", config)(*KEYS, *keys)
        return folder / "run"

    return run


@pytest.mark.parametrize(
    "kind",
    # The one with moments in 8 bits and weights that round stands for the others; each kind's state on one
    # rank and on two: checkpoint/test_moments.py.
    slow_but(lambda kind: kind == "master none", KINDS),
)
def test_a_run_is_resumed_bitwise_also_after_a_part_on_two_ranks(
    kind: str, whole_of: Callable[..., Path], run_recipe: Run, tmp_path: Path
) -> None:
    keys = (*KEYS, *KINDS[kind])
    whole = whole_of(*KINDS[kind])
    part, two, back = (tmp_path / each for each in ("part", "two", "back"))
    run_recipe(*keys, f"output_dir={part}", f"resume={checkpoint_of(whole, 3)}")
    ours, theirs = (digests(stored_tensors(checkpoint_of(run, 6))) for run in (part, whole))
    assert ours == theirs
    run_recipe(*keys, f"output_dir={two}", f"resume={checkpoint_of(whole, 2)}", ranks=2)
    run_recipe(*keys, f"output_dir={back}", f"resume={checkpoint_of(two, 4)}")
    # A gradient that is summed in another order may move an element to the next code of its moment. Measured:
    # 2.7e-6 at most, and 2e-5 where weights are rounded, too.
    tolerance = 2e-4 if kind == "master none" else 3e-5
    assert losses(two) == pytest.approx(losses(whole)[2:], rel=tolerance)
    assert losses(back) == pytest.approx(losses(whole)[4:], rel=tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("adamw_8bit", "float32"),
        # bfloat16 takes a minute where a processor emulates it. The losses of `master none` are compared with
        # those of float32 weights where it continues them, below.
        pytest.param("adamw_8bit", "bfloat16", marks=pytest.mark.slow),
        pytest.param("adamw_bf16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("master none", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_it_learns_as_float32_adamw_does(kind: str, dtype: str, run_recipe: Run, tmp_path: Path) -> None:
    last = []
    # The same batches in both runs, whatever a kind's own keys say.
    common = ("optimizer.beta2=0.95", f"compute_dtype={dtype}", "global_batch_size=8")
    for keys, folder in (((), tmp_path / "adamw"), (KINDS[kind], tmp_path / kind)):
        run_recipe(*keys, *common, f"output_dir={folder}")
        records = read_metrics(folder)
        last.append(records[-1]["eval_loss"])
        assert last[-1] < 0.8 * records[0]["eval_loss"]
    assert last[1] == pytest.approx(last[0], rel=2e-3)  # measured: 8.5e-4 at most


@pytest.mark.parametrize(
    ("before", "after", "said"),
    slow_but(
        # The moments themselves, of each pair: checkpoint/test_moments.py.
        lambda before, after, _: (before, after) == ("adamw", "adamw_8bit"),
        [
            ("adamw", "adamw_8bit", "moments that were in float32 are in 8 bits from here on, rounded once"),
            (
                "adamw_8bit",
                "adamw",
                "moments that were in 8 bits are in float32 from here on, the same values",
            ),
            (
                "adamw_bf16",
                "adamw_8bit",
                "moments that were in bfloat16 are in 8 bits from here on, rounded once",
            ),
            (
                "adamw_8bit",
                "adamw_bf16",
                "moments that were in 8 bits are in bfloat16 from here on, rounded once",
            ),
        ],
    ),
)
def test_another_kind_goes_on_with_the_moments_and_says_what_becomes_of_them(
    before: str, after: str, said: str, whole_of: Callable[..., Path], run_recipe: Run, tmp_path: Path
) -> None:
    first = whole_of(f"optimizer.kind={before}")
    done = run_recipe(*KEYS, f"optimizer.kind={after}", f"resume={checkpoint_of(first, 3)}")
    assert f"note: step 3 was trained with optimizer.kind {before!r} (now {after!r})" in done.stdout
    assert f"note: {said}" in done.stdout
    # Measured: 1e-5 at most, and 0 in the first step, whose weights are those of the checkpoint.
    assert losses(tmp_path / "run") == pytest.approx(losses(first)[3:], rel=1e-4)


def test_weights_without_a_master_are_cut_frozen_and_continue_float32_ones(
    run_recipe: Run, tmp_path: Path
) -> None:
    first, none, back = (tmp_path / each for each in ("first", "none", "back"))
    common = (*KEYS, "parallel.tensor=2", "freeze=[model.layers.0.*]", "compute_dtype=bfloat16")
    common += ("global_batch_size=2", "num_steps=4")
    run_recipe(*common, f"output_dir={first}", ranks=2)
    resume = f"resume={checkpoint_of(first, 2)}"
    run_recipe(*KINDS["master none"], *common, f"output_dir={none}", resume, ranks=2)
    run_recipe(*common, f"output_dir={back}", f"resume={checkpoint_of(none, 3)}", ranks=2)
    before, after = (stored_tensors(checkpoint_of(run, 4)) for run in (first, none))
    weights = {name for name in before if "/" not in name}
    frozen = {name for name in weights if "layers.0." in name}
    assert frozen
    assert {name for name in weights if after[name].dtype == torch.bfloat16} == weights - frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert all(each.dtype == torch.float32 for each in stored_tensors(checkpoint_of(back, 4)).values())
    # A weight is rounded by 2**-9 of itself. Measured: 3e-4 at most.
    assert losses(none) == pytest.approx(losses(first)[2:], rel=2e-3)
    assert losses(back) == pytest.approx(losses(none)[1:], rel=2e-3)


def test_a_kind_with_other_state_is_refused_before_anything_changes(run_recipe: Run, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_recipe(*KEYS, *KINDS["sgd"], "num_steps=1", f"output_dir={first}")
    done = run_recipe(*KEYS, f"resume={checkpoint_of(first, 1)}", code=2)
    assert "was saved with optimizer.kind=sgd, from whose state adamw cannot go on" in refusal(done)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["optimizer.master=none"], "none keeps bfloat16 weights alone, found compute_dtype=float32"),
        (["optimizer.master=none", "optimizer.kind=sgd"], "none cannot go with optimizer.kind=sgd"),
        (["optimizer.master=none", "optimizer.ema_decay=0.5"], "none cannot go with optimizer.ema_decay"),
        (
            ["optimizer.master=none", "compute_dtype=bfloat16", "precision.kind=int8_weight_only"],
            "int8_weight_only has no master weights anyway",
        ),
        (["optimizer.momentum=0.9"], "optimizer.momentum: optimizer.kind=adamw does not have it"),
        (
            ["optimizer.kind=sgd", "optimizer.beta2=0.9"],
            "optimizer.beta2: optimizer.kind=sgd does not have it",
        ),
        (["optimizer.kind=sgd", "precision.kind=int8_weight_only"], "sgd does not round stochastically"),
        (["optimizer.kind=muon", "precision.kind=int8_weight_only"], "muon does not round stochastically"),
        (["optimizer.kind=muon", "optimizer.master=none"], "none cannot go with optimizer.kind=muon"),
        (["optimizer.kind=muon", "parallel.tensor=2"], "with parallel.tensor=2 no GPU has the rows and"),
        (["optimizer.kind=muon", "parallel.cpu_offload=true"], "with parallel.cpu_offload=true no GPU has"),
        (["optimizer.kind=adamw8bit"], "'adamw8bit' is not one of .*; here that is adamw_8bit"),
        (["optimizer.kind=adamw_8bit", "optimizer.ema_decay=0.9"], "belongs to optimizer.kind=adamw, found"),
    ],
)
def test_what_cannot_be_is_refused(tiny_config: Path, keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(FinetuneConfig, tiny_config, keys)
