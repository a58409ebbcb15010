"""The recipe on one GPU: every kind under FSDP2 and NCCL, offloading, and resumes to the bit.

`LPTUNE_GPU_TESTS_ON=cpu` runs the same tests on a CPU, to try their own logic where there is no GPU.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cold import Finished
from tests.recipes.conftest import Run, losses, read_metrics

DEVICE = os.environ.get("LPTUNE_GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = [
    "none",
    "int8_rowcol",
    "int8_tensorwise",
    "float8_tensorwise",
    "float8_delayed",
    "float8_rowwise",
    "float8_blockwise",
    "int8_weight_only",
]


def _run(run_recipe: Run, *overrides: str, device: str = DEVICE, **env: str) -> Finished:
    """Compiled blocks in bfloat16, as a user runs them. Tuning takes longer than these runs."""
    emulate = device == "cpu" and any("float8" in override for override in overrides)
    common = (f"device={device}", "compute_dtype=bfloat16", "compile=block", "eval_every_steps=0")
    emulated = f"precision.emulate={str(emulate).lower()}"
    return run_recipe(*common, emulated, *overrides, is_cold=True, **({"LPTUNE_AUTOTUNE": "0"} | env))


def _skip_without_float8(kind: str) -> None:
    if "float8" in kind and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 before Ada")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_under_fsdp2_as_its_emulation_on_a_cpu_does(
    run_recipe: Run, tmp_path: Path, kind: str
) -> None:
    _skip_without_float8(kind)
    done = _run(run_recipe, f"precision.kind={kind}", "num_steps=8")
    if kind != "none":
        assert "verified:" in done.stdout
        assert "emulat" not in done.stdout or DEVICE == "cpu"
    _run(
        run_recipe,
        f"precision.kind={kind}",
        "num_steps=8",
        "compile=none",
        f"output_dir={tmp_path / 'cpu'}",
        device="cpu",
    )
    ours, expected = losses(tmp_path / "run"), losses(tmp_path / "cpu")
    # The first loss: bfloat16 rounds each of some 40 steps of the model to 2^-8 at random, in other orders.
    assert ours[0] == pytest.approx(expected[0], rel=2e-3)
    # A trajectory has no derivable bound; a wrong gradient is far outside of this.
    assert ours == pytest.approx(expected, rel=2e-2)
    assert ours[-1] < ours[0] - 0.3
    assert all(record["num_skipped"] == 0 for record in read_metrics(tmp_path / "run"))


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has nothing to offload to")
@pytest.mark.parametrize("kind", ["none", "int8_rowcol", "float8_tensorwise", "int8_weight_only"])
def test_offloaded_weights_train_alike(run_recipe: Run, tmp_path: Path, kind: str) -> None:
    _skip_without_float8(kind)
    common = (f"precision.kind={kind}", "num_steps=4")
    done = _run(run_recipe, *common, "parallel.cpu_offload=true")
    assert kind == "none" or "verified:" in done.stdout
    _run(run_recipe, *common, f"output_dir={tmp_path / 'on-gpu'}")
    # The update runs on the host: other roundings of float32.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "on-gpu"), rel=1e-3)


@pytest.mark.parametrize(
    "precision",
    [
        {"kind": "none"},
        {"kind": "int8_rowcol", "stochastic_rounding": "true"},
        {"kind": "float8_delayed"},
        {"kind": "int8_weight_only"},
    ],
    ids=lambda precision: precision["kind"],
)
def test_a_deterministic_run_resumes_to_the_bit(
    run_recipe: Run, tmp_path: Path, precision: dict[str, Any]
) -> None:
    _skip_without_float8(precision["kind"])
    common = [f"precision.{key}={value}" for key, value in precision.items()]
    common += ["deterministic=true", "schedule.kind=constant"]
    _run(run_recipe, *common, "num_steps=7")
    _run(run_recipe, *common, "num_steps=12")  # goes on from step 7, in the middle of an epoch
    _run(run_recipe, *common, "num_steps=12", f"output_dir={tmp_path / 'whole'}")
    keys = ("loss", "grad_norm")
    resumed, whole = (
        [[record[key] for key in keys] for record in read_metrics(tmp_path / name)]
        for name in ("run", "whole")
    )
    assert len(resumed) == len(whole) == 12
    assert resumed == whole
