"""The shadow check of a run: it changes nothing, finds a planted fault, and falls back for good."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from tests.helpers.slow import slow_but
from tests.recipes.conftest import Run, evaluations, losses, read_lines, read_metrics, refusal

LAYER = "model.layers.1.mlp.down_proj"
EMULATED = "precision.emulate=true"

PLANT = f"""
import os
import torch
from lptune import linear
from lptune.linear.kinds import rowwise
from lptune.linear.low_precision import LowPrecision

real_mm, real_convert, real_step = rowwise.scaled_mm, linear.convert, LowPrecision.step
faulty = dict(number=None, step=0)


def convert(*args, **kwargs):
    plan = real_convert(*args, **kwargs)
    faulty["number"] = next(layer.number for layer in plan.layers if layer.name == "{LAYER}")
    return plan


def step(self, step, num_passes):
    faulty["step"] = step
    return real_step(self, step, num_passes)


def scaled_mm(a, b, scale_a, scale_b, dtype, layer, gemm, **kwargs):
    is_here = os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", os.environ.get("RANK", "0"))
    if int(layer[0]) == faulty["number"] and gemm == 0 and faulty["step"] >= 5 and is_here:
        fault = os.environ["FAULT"]
        if fault == "scale":  # 16 times too large after quantizing
            scale_a = scale_a * 16
        elif fault == "saturation":  # quantized with a scale that is 16 times too small
            a, scale_a = (a.float() * 16).clamp(-127, 127).to(torch.int8), scale_a / 16
        elif fault == "underflow":  # quantized with a scale that is 16 times too large
            a, scale_a = (a.float() / 16).round().to(torch.int8), scale_a * 16
        elif fault == "zeros":
            a = torch.zeros_like(a)
    return real_mm(a, b, scale_a, scale_b, dtype, layer, gemm, **kwargs)


rowwise.scaled_mm, linear.convert, LowPrecision.step = scaled_mm, convert, step
"""
"""At the top of a copy of the recipe: from step 6 on, `output` of one layer goes wrong."""


def checks(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "shadow.jsonl")


def manifests(folder: Path) -> list[str]:
    paths = sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    assert paths
    return [path.read_text(encoding="utf-8") for path in paths]


SETTINGS = [
    (1, ("precision.kind=int8_rowcol", "precision.stochastic_rounding=true", "compute_dtype=bfloat16")),
    (1, ("precision.kind=int8_rowcol", "precision.grad_input=column", "activation_checkpointing=full")),
    (1, ("precision.kind=int8_rowcol", "compile=block", "activation_checkpointing=selective")),
    (2, ("precision.kind=float8_delayed", EMULATED, "parallel.reduce_every_micro_batch=true")),
    (2, ("precision.kind=float8_blockwise", EMULATED, "freeze=[model.layers.0]", "parallel.replicate=2")),
]


def _stands_for_the_others(ranks: int, overrides: tuple[str, ...]) -> bool:
    """On two ranks, with a history that a pass must not see. Random bits, on one: test_every_recipe.py."""
    return "precision.kind=float8_delayed" in overrides


@pytest.mark.parametrize(("ranks", "overrides"), slow_but(_stands_for_the_others, SETTINGS))
def test_the_check_changes_no_bit(
    ranks: int, overrides: tuple[str, ...], run_recipe: Run, tmp_path: Path
) -> None:
    common = ("num_steps=4", "eval_every_steps=2", "export.enabled=false", "checkpoint.every_steps=3")
    for name, every in (("without", 0), ("with", 2)):
        keys = (f"output_dir={tmp_path / name}", f"precision.shadow_every={every}")
        run_recipe(*common, *overrides, *keys, ranks=ranks)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert manifests(tmp_path / "with") == manifests(tmp_path / "without")
    evaluated = [[row["eval_loss"] for row in evaluations(tmp_path / name)] for name in ("with", "without")]
    assert evaluated[0] == evaluated[1]

    rows = {row["step"]: row for row in read_metrics(tmp_path / "with") if "loss" in row}
    assert [step for step, row in rows.items() if "shadow_worst_sqnr_db" in row] == [2, 4]
    assert not any(row["compile_time_s"] for step, row in rows.items() if step > 1), "compiled anew"
    for check in checks(tmp_path / "with"):
        row, layers = rows[check["step"]], check["layers"]
        assert len(layers) == 14
        assert row["shadow_loss_difference"] == check["loss"] - check["shadow_loss"]
        assert abs(row["shadow_loss_difference"]) < 0.05
        # The micro-batch is one of the four of the step.
        assert check["loss"] == pytest.approx(row["loss"], rel=0.1)
        numbers = [each[key] for each in layers.values() for key in each if key.endswith("_db")]
        found = [number for number in numbers if number is not None]
        # None is an SQNR of infinity: low precision did not run there. A frozen layer has no grad_weight.
        is_frozen = "freeze=[model.layers.0]" in overrides
        assert len(numbers) - len(found) == (7 if is_frozen else 0)
        assert row["shadow_worst_sqnr_db"] == min(found) > 10
        assert row["shadow_worst_gradient_cosine"] == min(each["gradient_cosine"] for each in layers.values())
        assert check["switched_to_high"] == []


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A copy of the recipe with a fault."""
    recipe = tmp_path / "planted.py"
    source = catalog.recipes()["full_finetune"].read_text(encoding="utf-8")
    recipe.write_text(source.replace("\nimport torch\n", f"\nimport torch\n{PLANT}", 1), encoding="utf-8")
    return str(recipe)


@pytest.mark.parametrize(
    ("fault", "ranks", "low_db", "high_db"),
    # linear/steps/test_shadow.py counts what saturates and underflows.
    slow_but(
        lambda fault, *_: fault == "scale",
        [
            # 16 times the output: the error is 15 times the signal.
            ("scale", 2, -23.6, -23.4),
            # 127 / 16 = 8 is what remains below the maximum.
            ("saturation", 1, 0.0, 10.0),
            # The step is 16 times as large, and the noise of x 24 dB above about 43 (22 at step 8, 23.5 at
            # step 12). What is healthy has 32 dB and more.
            ("underflow", 1, 17.0, 23.0),
            # The error is the signal.
            ("zeros", 1, -0.01, 0.01),
        ],
    ),
)
def test_a_planted_fault_is_found_named_and_ended_by_the_fallback(
    fault: str, ranks: int, low_db: float, high_db: float, planted: str, run_recipe: Run, tmp_path: Path
) -> None:
    common = (
        *("precision.kind=int8_rowcol", "precision.shadow_every=4", "precision.shadow_min_sqnr_db=28"),
        *("num_steps=12", "eval_every_steps=0", "export.enabled=false", "precision.all_gather=high"),
        "optimizer.lr=1e-3",
    )
    env = {"FAULT": fault} | ({"FAULT_RANK": "1"} if ranks > 1 else {})

    def run(name: str, *overrides: str, **environment: str) -> tuple[Path, str]:
        keys, folder = (*overrides, f"output_dir={tmp_path / name}"), tmp_path / name
        return folder, run_recipe(*common, *keys, ranks=ranks, recipe=planted, **environment).stdout

    warned, warning = run("warned", **env)
    fallen, fallback = run("fallen", "precision.shadow_on_bad=fallback", **env)

    line = f"warning: shadow check of step 8: {LAYER}: the SQNR of output is "
    for text in (warning, fallback):
        (found,) = [each for each in text.splitlines() if each.startswith(line)]
        assert "below precision.shadow_min_sqnr_db=28" in found
        assert "also" not in found  # the only layer
    assert "it runs in high precision from this step on" in fallback
    first, second, third = checks(fallen)
    assert first["layers"][LAYER]["output_sqnr_db"] > 35
    assert low_db < second["layers"][LAYER]["output_sqnr_db"] < high_db
    assert [each["switched_to_high"] for each in (first, second, third)] == [[], [LAYER], []]
    assert third["layers"][LAYER]["output_sqnr_db"] is None  # bit for bit high precision
    kept_bad = checks(warned)[2]["layers"][LAYER]["output_sqnr_db"]
    assert low_db - 1 < kept_bad < high_db + 1
    assert "shadow check of step 12" in warning
    fraction = {"saturation": "saturated", "underflow": "underflowed", "zeros": "underflowed"}.get(fault)
    if fraction is not None:
        assert second["layers"][LAYER][fraction] > first["layers"][LAYER][fraction] + 0.1

    bad, mended = (losses(folder) for folder in (warned, fallen))
    assert mended[:7] == bad[:7]
    if fault == "scale":  # with the same weights, on the same rows: what the fault costs
        costs = [[each["loss"] - each["shadow_loss"] for each in checks(run)] for run in (warned, fallen)]
        assert min(abs(cost) for cost in costs[0][1:]) > 10 * max(abs(costs[1][0]), abs(costs[1][2]))
        assert bad[11] > mended[11]

    low_share = [row["low_precision_flops_fraction"] for row in read_metrics(fallen)]
    plan = json.loads((fallen / "precision_plan.json").read_text(encoding="utf-8"))
    sizes = {layer["name"]: layer["shape"][0] * layer["shape"][1] for layer in plan["layers"]}
    share = sizes[LAYER] / sum(sizes.values())
    assert low_share[6] - low_share[7] == pytest.approx(share)
    assert low_share[7:] == [low_share[7]] * 5
    (layer,) = [each for each in plan["layers"] if each["reason"] and "shadow" in each["reason"]]
    assert layer["name"] == LAYER
    assert {layer["output"], layer["grad_input"], layer["grad_weight"]} == {"high"}


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    slow_but(
        lambda ranks, _: ranks == 1,  # above two ranks fall back together
        [
            (1, ("precision.kind=int8_rowcol", "precision.shadow_min_sqnr_db=36")),
            (2, ("precision.kind=float8_delayed", EMULATED, "precision.shadow_min_sqnr_db=24")),
            (2, ("precision.kind=int8_rowcol", "precision.shadow_min_sqnr_db=37", "compile=block")),
        ],
    ),
)
def test_a_resumed_run_keeps_what_fell_back(
    ranks: int, overrides: tuple[str, ...], run_recipe: Run, tmp_path: Path
) -> None:
    common = (
        *(*overrides, "precision.shadow_every=2", "precision.shadow_on_bad=fallback", "num_steps=8"),
        *("eval_every_steps=0", "export.enabled=false", "checkpoint.every_steps=3", "checkpoint.keep_last=9"),
        *("data.chat_template=null", "data.max_rows=600"),  # the rows that the limits above are for
    )
    whole, resumed, done_steps = tmp_path / "whole", tmp_path / "resumed", 6
    run_recipe(*common, f"output_dir={whole}", ranks=ranks)
    checkpoint = f"checkpoints/step-{done_steps:08d}"
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    run_recipe(*common, f"output_dir={resumed}", ranks=ranks)

    assert losses(resumed) == losses(whole)[done_steps:]
    assert manifests(resumed)[-1] == manifests(whole)[-1]
    assert (resumed / "precision_plan.json").read_text() == (whole / "precision_plan.json").read_text()
    share = [row["low_precision_flops_fraction"] for row in read_metrics(whole)]
    assert share[0] > share[3] == share[4] >= share[7]
    assert [row["low_precision_flops_fraction"] for row in read_metrics(resumed)] == share[done_steps:]
    found, expected = ([{**each, "time_s": 0} for each in checks(run)] for run in (resumed, whole))
    assert found == [each for each in expected if each["step"] > done_steps]


def test_the_card_says_what_fell_back_and_a_resume_with_warn_says_that_it_is_low_again(
    run_recipe: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    common = (
        *("precision.kind=int8_rowcol", "eval_every_steps=0", f"output_dir={folder}"),
        *("precision.shadow_min_sqnr_db=1000", "precision.shadow_every=1"),  # all layers, from step 1 on
    )
    run_recipe(*common, "precision.shadow_on_bad=fallback", "num_steps=2")
    card = (folder / "export" / "README.md").read_text(encoding="utf-8")
    assert "## Steps 1 to 2: int8_rowcol" in card
    assert card.count("precision.shadow_on_bad: fell back") >= 7
    assert [row["low_precision_flops_fraction"] for row in read_metrics(folder)] == [0, 0]
    plan = json.loads((folder / "precision_plan.json").read_text(encoding="utf-8"))
    assert {layer["output"] for layer in plan["layers"]} == {"high"}

    done = run_recipe(*common, "num_steps=4")
    assert (
        "note: layers that had fallen back to high precision run as precision.kind=int8_rowcol again"
        in done.stdout
    )
    assert read_metrics(folder)[-1]["low_precision_flops_fraction"] > 0.5
    card = (folder / "export" / "README.md").read_text(encoding="utf-8")
    assert "## Steps 1 to 2: int8_rowcol" in card
    assert "## Steps 3 to 4: int8_rowcol" in card


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["precision.kind=int8_weight_only"], "keeps no weights of higher precision"),
        (["precision.kind=int8_rowcol", "parallel.tensor=2"], "parallel.tensor=2 cuts them"),
        (
            ["precision.kind=int8_rowcol", "precision.shadow_on_bad=fallback", "precision.all_gather=low"],
            "precision.shadow_on_bad: fallback needs weights in compute dtype",
        ),
        (["precision.shadow_on_bad=stop"], "is not one of warn, fallback"),
        (["precision.shadow_min_sqnr_db=nan"], "shadow_min_sqnr_db: must be finite"),
    ],
)
def test_what_cannot_be_checked_is_an_error(overrides: list[str], said: str, tiny_config: Path) -> None:
    with pytest.raises(UserError, match=said):
        recipe.load(
            catalog.find_recipe("full_finetune"), tiny_config, ["precision.shadow_every=1", *overrides]
        )


def test_a_copy_of_a_recipe_without_the_check_or_its_backward_says_so(
    run_recipe: Run, tmp_path: Path
) -> None:
    copy = tmp_path / "old.py"
    text = catalog.recipes()["full_finetune"].read_text(encoding="utf-8")
    without, count = re.subn(r"( *)for batch in step\.shadow_batches\(\):\n(?:\1 +.*\n)+", "", text)
    assert count == 1
    copy.write_text(without, encoding="utf-8")
    keys = ("precision.kind=int8_rowcol", "num_steps=1", "eval_every_steps=0", "precision.shadow_every=1")
    done = run_recipe(*keys, recipe=str(copy), code=2)
    assert "precision.shadow_every: this recipe makes no shadow check" in refusal(done)

    copy.write_text(text.replace("(loss * step.loss_factor).backward()", "pass", 1), encoding="utf-8")
    done = run_recipe(*keys, recipe=str(copy), code=1)
    assert "RuntimeError: the loop over step.shadow_batches() is to call loss.backward()" in done.stderr


def test_with_precision_none_there_is_nothing_to_check(run_recipe: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ("num_steps=2", "eval_every_steps=0", "export.enabled=false", f"output_dir={folder}")
    run_recipe("precision.shadow_every=1", "precision.shadow_on_bad=fallback", *common)
    assert not (folder / "shadow.jsonl").exists()
