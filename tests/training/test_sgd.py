"""SGD: the definition, and what torch's own computes where the two agree."""

import pytest
import torch
from torch import nn

from lptune import training
from lptune.config import OptimizerConfig


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_torchs_with_the_decay_on_the_weight(momentum: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    expected = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    buffers = {name: torch.zeros_like(each) for name, each in expected.items()}
    optimizer = training.build_optimizer(
        layer, OptimizerConfig(kind="sgd", lr=0.1, momentum=momentum, weight_decay=0.5)
    )
    for _ in range(4):
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            buffers[name] = momentum * buffers[name] + parameter.grad
            decay = 1 - 0.1 * 0.5 if parameter.dim() == 2 else 1.0
            expected[name] = expected[name] * decay - 0.1 * buffers[name]
        optimizer.step()
    for name, parameter in layer.named_parameters():
        # A few roundings an update, of values below 8.
        assert torch.allclose(parameter, expected[name], rtol=0, atol=4 * 4 * 8 * 2**-24)
    kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(kept) == (2 if momentum else 0)
