"""Checkpoints have no precision in them: INT8 weights come from every kind of run and go to every kind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lptune import checkpoint, distributed, linear, training
from lptune.config import OptimizerConfig, PrecisionConfig
from lptune.linear import Int8Weight
from tests.helpers.saving import save

INT8 = PrecisionConfig(kind="int8_weight_only")


def _run(int8: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    if int8:
        linear.convert(model, INT8)
    return model, training.build_optimizer(model, OptimizerConfig(lr=1e-3), seed=7)


def _steps(run: tuple[nn.Sequential, torch.optim.Optimizer], first: int, last: int) -> list[float]:
    model, optimizer = run
    losses = []
    for step in range(first, last):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _save(run: tuple[nn.Sequential, torch.optim.Optimizer], folder: Path, step: int) -> Path:
    with distributed.session("cpu") as world:
        return save(folder, step, *run, world)


def _loaded(path: Path, int8: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    run = _run(int8)
    for parameter in run[0].parameters():
        torch.nn.init.zeros_(parameter)
    checkpoint.load_state(checkpoint.verify(path), *run)
    return run


def test_a_run_that_goes_on_from_its_checkpoint_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = _run(int8=True)
    expected = _steps(whole, 0, 12)
    part = _run(int8=True)
    losses = _steps(part, 0, 5)
    path = _save(part, tmp_path, 5)
    resumed = _loaded(path, int8=True)
    assert losses + _steps(resumed, 5, 12) == expected
    for ours, theirs in zip(resumed[0].parameters(), whole[0].parameters(), strict=True):
        if isinstance(theirs, Int8Weight):
            assert isinstance(ours, Int8Weight)
            assert torch.equal(ours.q_NK, theirs.q_NK)
            assert torch.equal(ours.scale_N1, theirs.scale_N1)


def test_stored_scales_are_used_where_the_values_would_give_others(tmp_path: Path) -> None:
    run = _run(int8=True)
    _steps(run, 0, 1)
    weights = {name: p for name, p in run[0].named_parameters() if isinstance(p, Int8Weight)}
    with torch.no_grad():
        for weight in weights.values():
            weight.q_NK.clamp_(-100, 100)
    resumed = _loaded(_save(run, tmp_path, 1), int8=True)
    for name, weight in weights.items():
        found = resumed[0].get_parameter(name)
        assert isinstance(found, Int8Weight)
        assert torch.equal(found.q_NK, weight.q_NK), name
        assert torch.equal(found.scale_N1, weight.scale_N1), name


def test_the_file_holds_plain_dequantized_weights_and_their_scales(tmp_path: Path) -> None:
    run = _run(int8=True)
    _steps(run, 0, 2)
    stored = load_file(_save(run, tmp_path, 2) / "model-00000.safetensors")
    weights = {name: p for name, p in run[0].named_parameters() if isinstance(p, Int8Weight)}
    assert stored.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"} | {
        f"int8_scale/{n}" for n in weights
    }
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.dequantize())
        assert torch.equal(stored[f"int8_scale/{name}"], weight.scale_N1)


def test_a_float32_run_goes_on_from_int8_weights_and_back(tmp_path: Path) -> None:
    int8 = _run(int8=True)
    _steps(int8, 0, 3)
    plain = _loaded(_save(int8, tmp_path, 3), int8=False)
    for name, parameter in plain[0].named_parameters():
        expected = linear.dequantized(int8[0].get_parameter(name))
        assert torch.equal(parameter, expected), name
        for moment in ("exp_avg", "exp_avg_sq"):
            theirs = int8[1].state[int8[0].get_parameter(name)][moment]
            assert torch.equal(plain[1].state[parameter][moment], theirs)
    assert _steps(plain, 3, 4)[0] == pytest.approx(_steps(int8, 3, 4)[0], rel=1e-6)

    again = _loaded(_save(plain, tmp_path, 4), int8=True)
    for name, parameter in again[0].named_parameters():
        wanted = plain[0].get_parameter(name).detach()
        if isinstance(parameter, Int8Weight):
            assert torch.equal(parameter.q_NK, Int8Weight.from_float(wanted).q_NK)
        else:
            assert torch.equal(parameter, wanted)
