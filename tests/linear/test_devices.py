"""Every kind on every device gives the numbers of its emulation on CPU, eager and compiled."""

import pytest
import torch
from torch import Tensor, nn

from lptune import linear
from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS, PrecisionConfig
from tests.proofs import noise

KINDS = [kind for kind in PRECISION_KINDS if kind != "none"]
T, K, N = 96, 256, 160
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def _results(kind: str, device: str, emulate: bool, compiled: bool) -> dict[str, Tensor]:
    """output, grad_input and grad_weight of one layer, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(size, generator=generator).bfloat16() for size in ((T, K), (T, N), (N, K)))
    layer = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=device))
    with torch.no_grad():
        layer[0].weight.copy_(w)
    try:
        plan = linear.convert(layer, PrecisionConfig(kind=kind, emulate=emulate))
    except UserError as error:
        pytest.skip(str(error))
    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    x = x.to(device).requires_grad_()
    scaling = linear.DelayedScaling(plan, torch.device(device))
    linear.StochasticRounding(layer, plan, seed=0).start(0, 0)
    with linear.verify_step(layer, plan, 1) as verified, scaling.step():
        out = run(x)
        out.backward(g.to(device))
    assert verified.num_gemms == len(PrecisionConfig(kind=kind, emulate=emulate).low_gemms())
    weight = layer[0].weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    assert x.grad is not None
    return {"output": out.detach().cpu(), "grad_input": x.grad.cpu(), "grad_weight": weight.grad.cpu()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_computes_what_the_emulation_says(kind: str, compiled: bool, device: str) -> None:
    torch._dynamo.reset()  # one function, compiled for every kind
    expected = _results(kind, "cpu", emulate=True, compiled=False)
    # A CPU has INT8 GEMMs of its own; float8 is emulated there, and only the compiler can go wrong.
    emulate = device == "cpu" and "int8" not in kind
    for name, actual in _results(kind, device, emulate, compiled).items():
        if device == "cpu" or ("int8" in kind and kind != "int8_weight_only"):
            # The sum is exact in INT8, and the very same in float8 where it is the same device's.
            assert torch.equal(actual, expected[name]), name
        else:
            # Tensor cores keep fewer bits of a float8 sum than float32 has (Hopper: 14, arXiv:2412.19437):
            # that and one rounding to bfloat16 is what may differ. int8_weight_only multiplies in bfloat16,
            # whose order of summation is the device's.
            assert noise.relative_error(actual, expected[name]) < 2.0**-8, name
