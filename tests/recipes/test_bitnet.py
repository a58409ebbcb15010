"""A run with ternary weights, through the command line: planned, verified, resumed, exported."""

import json
from pathlib import Path

import pytest
import torch

from tests.recipes.conftest import Run, losses, read_metrics, weights

COMMON = ("precision.kind=bitnet", "optimizer.lr=1e-3", "num_steps=6", "checkpoint.every_steps=3")


def test_it_goes_on_bit_for_bit_and_on_another_number_of_ranks(run_recipe: Run, tmp_path: Path) -> None:
    whole, same, other = (tmp_path / name for name in ("whole", "same", "other"))
    done = run_recipe(*COMMON, f"output_dir={whole}", "export.quantized=bitnet", ranks=2)
    assert "8-bit GEMMs ran in the first step, 14 weights gathered in 8 bits, as planned" in done.stdout
    half_way = f"resume={whole / 'checkpoints' / 'step-00000003'}"
    run_recipe(*COMMON, f"output_dir={same}", half_way, "export.quantized=bitnet", ranks=2)
    run_recipe(*COMMON, f"output_dir={other}", half_way)
    assert losses(same) == losses(whole)[3:]
    files = [folder / "export" / "model.safetensors" for folder in (whole, same)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert losses(other) == pytest.approx(losses(whole)[3:], rel=1e-6)

    plan = json.loads((whole / "precision_plan.json").read_text(encoding="utf-8"))
    rows = {
        tuple(layer[key] for key in ("output", "grad_input", "grad_weight", "all_gather"))
        for layer in plan["layers"]
        if layer["reason"] is None
    }
    assert rows == {("int8 x ternary", "high", "high", "int8 ternary, 2 bits")}
    sizes = [(layer["shape"][0] * layer["shape"][1], layer["reason"] is None) for layer in plan["layers"]]
    low = sum(size for size, is_low in sizes if is_low) / sum(size for size, _ in sizes)
    # One GEMM of three.
    assert read_metrics(whole)[1]["low_precision_flops_fraction"] == pytest.approx(low / 3)
    exported = weights(whole / "export")
    packed = [name for name, each in exported.items() if each.dtype == torch.uint8]
    assert len(packed) == plan["num_converted"] == 14
    config = json.loads((whole / "export" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "bitnet"
