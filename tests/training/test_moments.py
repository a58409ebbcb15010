"""Moments in 8 bits: what a code loses, what encoding again does not, and AdamW on them."""

import pytest
import torch
from torch import Tensor, nn

from lptune import training
from lptune.config import OptimizerConfig
from lptune.plan.memory import MemoryLog
from lptune.training import chunked_adamw, moments
from lptune.training.moments import BLOCK, EXP_AVG, EXP_AVG_SQ, Blocks8Bit

BOTH = pytest.mark.parametrize("storage", [EXP_AVG, EXP_AVG_SQ], ids=["exp_avg", "exp_avg_sq"])
K = 2 * BLOCK + 48
"""Two blocks and a shorter one."""


def _stored(storage: Blocks8Bit, values_NK: Tensor) -> tuple[Tensor, ...]:
    parts = storage.new(values_NK)
    storage.write(parts, values_NK.clone())
    return parts


def _values(storage: Blocks8Bit, n: int = 64) -> Tensor:
    """Magnitudes over ten powers of ten, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    values_NK = torch.randn(n, K, generator=generator) * 10 ** (-5 * torch.rand(n, K, generator=generator))
    values_NK[0, :BLOCK] = 0
    values_NK[1] *= 1e-8
    values_NK[2, 5] = 1e30
    return values_NK if storage is EXP_AVG else values_NK.square()


def _amax(values_NK: Tensor) -> Tensor:
    """Of each element's block."""
    return torch.cat(
        [part.abs().amax(1, keepdim=True).expand_as(part) for part in values_NK.split(BLOCK, 1)], 1
    )


@BOTH
def test_an_element_is_stored_as_the_nearest_value_times_the_largest_of_its_block(
    storage: Blocks8Bit,
) -> None:
    values_NK = _values(storage).clamp(-1, 1)
    parts = _stored(storage, values_NK)
    assert [part.dtype for part in parts] == [torch.uint8, torch.float32]
    assert [tuple(part.shape) for part in parts] == [(64, K), (64, 3)]
    amax_NK = _amax(values_NK)
    assert torch.equal(_amax(storage.read(parts)), amax_NK)  # the largest is stored exactly
    scaled_NK = (values_NK / amax_NK).nan_to_num(0)
    of_all, _ = (
        storage.read((torch.arange(256, dtype=torch.uint8).view(2, 128), torch.ones(2, 1))).view(-1).sort()
    )
    assert len(of_all.unique()) == 256
    nearest = (scaled_NK[..., None] - of_all).abs().amin(-1)
    error = (storage.read(parts) / amax_NK).nan_to_num(0).sub(scaled_NK).abs()
    # The value is the nearest to x rounded to bfloat16, which is within 2**-8 of x.
    bound = nearest + 2 * 2**-8 * scaled_NK.abs() + 2**-22
    above_zero = (storage is EXP_AVG_SQ) & (scaled_NK < of_all[1])
    assert (error <= torch.where(above_zero, of_all[1], bound)).all()


@BOTH
def test_what_was_read_is_written_with_the_same_bits(storage: Blocks8Bit) -> None:
    for values_NK in (_values(storage), _values(storage) * 1e-25, torch.full((1, 3), torch.inf)):
        parts = _stored(storage, values_NK)
        again = _stored(storage, storage.read(parts))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, parts, strict=True))


def test_no_second_moment_above_zero_becomes_zero() -> None:
    values_NK = torch.tensor([[1.0, 1e-12, 0.0]])
    read_NK = EXP_AVG_SQ.read(_stored(EXP_AVG_SQ, values_NK))
    assert (read_NK > 0).tolist() == [[True, True, False]]


@BOTH
def test_new_moments_are_zero_and_a_nan_shows(storage: Blocks8Bit) -> None:
    assert not storage.read(storage.new(torch.ones(4, K))).any()
    values_NK = torch.ones(1, K)
    values_NK[0, BLOCK] = torch.nan
    read_NK = storage.read(_stored(storage, values_NK))
    assert read_NK.isnan().view(-1).tolist() == [False] * BLOCK + [True] * BLOCK + [False] * 48


def _model() -> nn.Sequential:
    """A matrix of 8 bits with a bias, and one that is too small for that."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 64), nn.Linear(64, 8))


def _trained(kind: str, num_steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = _model()
    optimizer = training.build_optimizer(model, OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.1))
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def _all(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{key}/{name}"] = torch.as_tensor(value).clone()
    return found


def test_the_first_update_is_that_of_float32_and_what_stays_in_float32_stays_bitwise() -> None:
    ours, theirs = (_all(*_trained(kind, 1)) for kind in ("adamw_8bit", "adamw"))
    assert ours.keys() - theirs.keys() == {
        "exp_avg_8bit/0.weight",
        "exp_avg_scale/0.weight",
        "exp_avg_sq_8bit/0.weight",
        "exp_avg_sq_scale/0.weight",
        "num_updates/0.weight",
    }
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() & theirs.keys())
    for moment, storage in (("exp_avg", EXP_AVG), ("exp_avg_sq", EXP_AVG_SQ)):
        parts = tuple(ours[f"{moment}{suffix}/0.weight"] for suffix in storage.SUFFIXES)
        expected = storage.read(_stored(storage, theirs[f"{moment}/0.weight"]))
        assert torch.equal(storage.read(parts), expected)
    later, its_twin = (_all(*_trained(kind, 9)) for kind in ("adamw_8bit", "adamw"))
    unlike = {key for key in later.keys() & its_twin.keys() if not torch.equal(later[key], its_twin[key])}
    assert unlike == {"0.weight"}


def test_moments_in_bfloat16_stay_unbiased_where_updates_are_below_half_a_step() -> None:
    # Of a second moment that decays by a thousandth an update, rounding to nearest keeps every bit.
    num_steps, layer = 100, nn.Linear(64, 64, bias=False)
    optimizer = training.build_optimizer(layer, OptimizerConfig(kind="adamw_bf16", lr=1e-9, beta2=0.999))
    layer.weight.grad = torch.ones(64, 64)
    optimizer.step()
    optimizer.state[layer.weight]["exp_avg_sq_bf16"].fill_(1.0)
    layer.weight.grad.zero_()
    for _ in range(num_steps):
        optimizer.step()
    expected = 0.999**num_steps
    found = optimizer.state[layer.weight]["exp_avg_sq_bf16"].double()
    # Each update rounds to steps of 2**-8 at most: a variance of step**2 / 4, which the following ones decay.
    sigma = 2**-8 / 2 * num_steps**0.5 / 64
    assert abs(float(found.mean()) - expected) < 4 * sigma
    assert expected < 1 - 20 * sigma


def test_an_update_takes_memory_for_a_few_rows_however_large_the_parameter_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked_adamw, "_CPU_CHUNK", 8 * BLOCK)
    taken = []
    for num_rows in (64, 1024):
        layer = nn.Linear(BLOCK, num_rows, bias=False)
        optimizer = training.build_optimizer(layer, OptimizerConfig(kind="adamw_8bit"))
        layer.weight.grad = torch.randn(num_rows, BLOCK)
        optimizer.step()
        with MemoryLog() as log:
            log.label(
                "resting", [layer.weight, layer.weight.grad, list(optimizer.state[layer.weight].values())]
            )
            log.phase("update")
            optimizer.step()
        peak = log.peaks()["update"]
        taken.append(peak.total() - peak["resting"])
    assert taken[0] == taken[1] <= 40 * 8 * BLOCK


def test_small_matrices_vectors_and_stacks_keep_float32() -> None:
    kept = [(63, 64), (4096,), (4, 32, 64), (256, 63), (4096, 1)]
    assert all(moments.keys(moments.storages("adamw_8bit", torch.empty(s))) == moments.MOMENTS for s in kept)
    assert moments.storages("adamw_8bit", torch.empty(64, 64)) == (EXP_AVG, EXP_AVG_SQ)
