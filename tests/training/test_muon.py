"""Muon: the definition in float64, torch's own, and which weights it takes; stacks are several matrices."""

import math

import pytest
import torch
from torch import Tensor, nn

from lptune import models, training
from lptune.config import OptimizerConfig
from lptune.models.hf.experts import GroupedLinear
from lptune.training import muon

SHAPES = [(48, 32), (32, 80), (40, 40), (7, 1)]


def _optimizer(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return training.build_optimizer(model, OptimizerConfig(kind="muon", lr=lr, weight_decay=0.1))


def _polynomial(update: Tensor) -> Tensor:
    """The definition by singular values, which the polynomial maps one by one."""
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_definition_in_float64_and_torchs_in_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, peer = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
    peer.load_state_dict(layer.state_dict())
    weight = layer.weight.detach().double()
    before = weight.clone()
    momentum = torch.zeros_like(weight)
    ours = _optimizer(layer)
    theirs = torch.optim.Muon(peer.parameters(), 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    scale = 1e-2 * 0.2 * math.sqrt(max(shape))
    for _ in range(3):
        gradient = torch.randn(shape)
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        update = 0.05 * gradient.double() + 0.95 * momentum
        weight = weight * (1 - 1e-2 * 0.1) - scale * _polynomial(update)
        for each, optimizer in ((layer, ours), (peer, theirs)):
            each.weight.grad = gradient.clone()
            optimizer.step()
    moved = (weight - before).norm()
    # Five steps of three products. A product rounds its values by 2**-24 of sums of up to 80 terms; the
    # polynomial has a slope of up to 3.5 a step where singular values are small, but these are rounded by
    # the same part of the largest. torch's products are in bfloat16.
    assert (layer.weight - weight).norm() < 3 * 15 * 80 * 2**-24 * moved
    assert (layer.weight - peer.weight).norm() < 15 * 2**-8 * moved


def test_singular_values_become_about_one() -> None:
    x = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(muon.orthogonalized(x))
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert torch.equal(muon.orthogonalized(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 5))


def test_matrices_of_a_stack_are_updated_as_they_are_alone() -> None:
    torch.manual_seed(0)
    stack = GroupedLinear(3, 16, 24)
    alone = [nn.Linear(16, 24, bias=False) for _ in range(3)]
    for layer, rows in zip(alone, stack.weight.detach().split(24), strict=True):
        layer.weight.data.copy_(rows)
    gradient = torch.randn(72, 16)
    gradient[:24] *= 100  # which would be nearly all of the norm of the stack
    stack.weight.grad = gradient.clone()
    _optimizer(stack).step()
    for layer, rows in zip(alone, gradient.split(24), strict=True):
        layer.weight.grad = rows.clone()
        _optimizer(layer).step()
    # Weights below 1, of an update of some roundings; a batched product may add in another order.
    whole = torch.cat([layer.weight for layer in alone])
    assert torch.allclose(stack.weight, whole, rtol=0, atol=15 * 24 * 2**-24)


@pytest.mark.parametrize("family", ["llama3_1", "phi3"])
def test_it_takes_the_matrices_of_blocks_and_fused_ones_apart(family: str) -> None:
    content = models.PRESETS["llama3_1"]["tiny"]
    if family == "phi3":
        content = content | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
        content.pop("rope_scaling", None)
    model = models.build_on_meta(models.config_from_dict(content, "test"))
    found = muon.matrices(model)
    assert found
    assert all(".layers." in name and name.endswith("proj.weight") for name in found)
    assert len(found) == len(model.blocks) * (7 if family == "llama3_1" else 4)
    fused = {name: rows for name, rows in found.items() if len(rows) > 1}
    assert len(fused) == (0 if family == "llama3_1" else 2 * len(model.blocks))
    parameters = dict(model.named_parameters())
    assert all(sum(rows) == parameters[name].shape[0] for name, rows in found.items())
    models.freeze(model, ("layers.0",))
    assert not any(".layers.0." in name for name in muon.matrices(model))


def test_a_bias_and_an_embedding_have_moments_of_adamw() -> None:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    optimizer = _optimizer(model)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    kept = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert kept["1.weight"] == {"momentum_buffer"}
    assert kept["0.weight"] == kept["1.bias"] == {"exp_avg", "exp_avg_sq", "step"}
