"""Weights in bfloat16 without a float32 master: right in expectation, with the same bits on any number of
ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lptune import distributed, numerics, training
from lptune.config import OptimizerConfig
from lptune.training import chunked_adamw, moments
from tests.helpers.ranks import Ranks
from tests.training.test_chunked_adamw import assert_unbiased

K = 144


def _model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Matrices whose rows no two ranks have alike, a vector, and a small matrix."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 33), nn.Linear(33, 5)).bfloat16().to(dtype)


def _stepped(model: nn.Sequential, kind: str, num_steps: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """The weights after steps with gradients that depend on the step alone."""
    cfg = OptimizerConfig(kind=kind, master="none", lr=1e-4, weight_decay=0.1)
    optimizer = training.build_optimizer(model, cfg, seed)
    for step in range(num_steps):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name) + 100 * step)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def _sharded(rank: int, num_ranks: int, kind: str) -> dict[str, Tensor]:
    with distributed.session("cpu") as world:
        model = _model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=world.mesh, mp_policy=policy)
        return _stepped(model, kind, 4)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_bits_depend_on_neither_ranks_nor_chunks(
    kind: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _stepped(_model(), kind, 4)
    assert all(each.dtype == torch.bfloat16 for each in expected.values())
    sharded = ranks.run(_sharded, 3, kind)[0]
    monkeypatch.setattr(chunked_adamw, "_CPU_CHUNK", 5 * K)
    in_chunks = _stepped(_model(), kind, 4)
    for name, tensor in expected.items():
        if name.startswith("0.weight"):  # torch's kernel rounds otherwise in the last elements of a tensor
            assert torch.equal(sharded[name], tensor)
            assert torch.equal(in_chunks[name], tensor)
        # There an ulp of float32 decides in one of 2**16 elements.
        assert (sharded[name] == tensor).float().mean() > 0.99


def _one_row(rank: int, num_ranks: int, kind: str, master: str) -> dict[str, Tensor]:
    with distributed.session("cpu") as world:
        torch.manual_seed(0)
        layer = nn.Linear(4096, 1).to(torch.bfloat16 if master == "none" else torch.float32)
        fully_shard(layer, mesh=world.mesh)
        optimizer = training.build_optimizer(layer, OptimizerConfig(kind=kind, master=master, lr=1e-2))
        layer(torch.ones(1, 4096, dtype=layer.weight.dtype)).sum().backward()
        optimizer.step()
        return {name: distributed.full_tensor(each).detach() for name, each in layer.named_parameters()}


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_bf16"])
@pytest.mark.parametrize("master", ["none", "float32"])
def test_a_rank_without_rows_updates_nothing(kind: str, master: str, ranks: Ranks) -> None:
    torch.manual_seed(0)
    before = nn.Linear(4096, 1)
    after = ranks.run(_one_row, 2, kind, master)[0]
    for name, parameter in before.named_parameters():
        step = after[name].float() - parameter.detach().to(after[name].dtype).float()
        assert abs(float(step.mean()) + 1e-2) < 1e-3


def test_an_update_is_unbiased_in_every_element() -> None:
    num_seeds, name = 256, "0.weight"
    cfg = OptimizerConfig(lr=1e-4, weight_decay=0.1)
    twin = _model(torch.float32)
    optimizer = training.build_optimizer(twin, cfg)
    for each, parameter in twin.named_parameters():
        generator = torch.Generator().manual_seed(len(each))
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().float()
    optimizer.step()
    wanted = twin.get_parameter(name).detach().double()
    total = torch.zeros_like(wanted)
    for seed in range(num_seeds):
        total += _stepped(_model(), "adamw", seed=seed)[name].double() - wanted
    below32 = wanted.float().view(torch.int32) & -0x10000
    below, above = (each.view(torch.float32).double() for each in (below32, below32 + 0x10000))
    assert_unbiased(total, (wanted - below) / (above - below), above - below, num_seeds)


def test_weight_and_moment_draw_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[set[float]]()

    def rounded(x_MK: Tensor, key: int, first: int) -> Tensor:
        index = torch.arange(first, first + x_MK.numel())
        drawn.append(set(numerics.uniform(key, index).tolist()))
        return x_MK.to(torch.bfloat16)

    for module in (chunked_adamw, moments):
        monkeypatch.setattr(module, "round_to_bfloat16", rounded)
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = training.build_optimizer(layer, OptimizerConfig(kind="adamw_bf16", master="none"))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    second_moment, weight = drawn
    # Of 2**24 numbers each draws 4,096: by chance they share one.
    assert len(second_moment & weight) < 10


def test_seed_and_name_change_the_rounding_and_updates_below_a_step_add_up() -> None:
    base = _stepped(_model(), "adamw")["0.weight"]
    assert torch.equal(_stepped(_model(), "adamw")["0.weight"], base)
    assert not torch.equal(_stepped(_model(), "adamw", seed=1)["0.weight"], base)
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(layer.weight)
    optimizer = training.build_optimizer(layer, OptimizerConfig(master="none", lr=1e-4))
    for _ in range(50):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    # Each update is lr, and a step below 1 is 2**-8: to nearest nothing would move. 4,096 elements, each of
    # which has a variance of at most 50 * step * lr.
    sigma = (50 * 2**-8 * 1e-4) ** 0.5 / 64
    assert abs(float(layer.weight.detach().float().mean()) - (1 - 50 * 1e-4)) < 4 * sigma
