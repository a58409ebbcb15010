"""Before the first step, a run says in one line what its precision costs, if it is much."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lptune import data, distributed, linear, models
from lptune.cli import catalog
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, ParallelConfig, PrecisionConfig
from lptune.training.first_loss import check_first_loss
from tests.helpers.outliers import fill, known_batch
from tests.recipes.conftest import Run

TINY = models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test")


@pytest.fixture
def world() -> Iterator[distributed.World]:
    with distributed.session("cpu", ParallelConfig()) as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "factor", "is_said"),
    [
        ("int8_rowcol", 1, False),
        ("int8_rowcol", 300, True),
        ("int8_rotated", 1, False),
        ("int8_weight_only", 300, False),
        ("int4_weight", 300, False),
        ("bitnet", 300, False),
        ("none", 300, False),
    ],
)
def test_outliers_are_said_once_and_healthy_activations_are_not(
    kind: str, factor: int, is_said: bool, world: distributed.World, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(source="builtin", seq_len=64),
        micro_batch_size=8,
        global_batch_size=8,
        compile="none",
        device="cpu",
        compute_dtype="float32",
        precision=PrecisionConfig(kind=kind, verify=False),
    )
    model = models.build_on_meta(TINY)
    plan = linear.convert(model, cfg.precision, device=world.device)
    distributed.parallelize(model, world, cfg)
    distributed.materialize(model, world, cfg)
    fill(model, factor)
    batch = known_batch(TINY, rows=8, seq_len=64)
    low = linear.LowPrecision(model, plan, world=world)
    fake = SimpleNamespace(micro_batches=lambda _: [batch], micro_batches_per_rank=1, rank=0)
    loader = cast(data.Loader, fake)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    check_first_loss(model, low, loader, cfg, world, 0)
    out = capsys.readouterr().out
    assert out.count("warning: precision.kind=int8_rowcol: the loss of the first micro-batch is") == is_said
    assert out.count("\n") == is_said
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


def test_a_loss_that_is_finite_in_high_precision_alone_is_said(run_recipe: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "own.py"
    source = catalog.recipes()["full_finetune"].read_text(encoding="utf-8")
    fault = """
from lptune.linear.kinds import rowwise
real_mm = rowwise.scaled_mm
rowwise.scaled_mm = lambda *args, **kwargs: real_mm(*args, **kwargs) * float("nan")
"""
    recipe.write_text(source.replace("\n\ndef main(", f"{fault}\n\ndef main(", 1), encoding="utf-8")
    done = run_recipe(
        "precision.kind=int8_rowcol", "num_steps=1", "export.enabled=false", "eval_every_steps=0",
        recipe=str(recipe),
    )  # fmt: skip
    assert "the loss of the first micro-batch is nan" in done.stdout
