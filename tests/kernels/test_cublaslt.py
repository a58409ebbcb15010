"""The calls of torch's float8 GEMMs, held to the rules of ScaledBlas.cpp by stand-ins that compute the same.

There is no such GEMM on a CPU. A stand-in refuses what torch refuses, dequantizes and multiplies, so a call
with a wrong layout or wrong scales fails here and not on the first GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.kernels import backend, choose_backend, cublaslt, record_gemms
from tests.proofs import noise


def _check_operands(a: Tensor, b: Tensor) -> None:
    assert a.dtype.itemsize == b.dtype.itemsize == 1
    assert a.stride() == (a.shape[1], 1), "a must be row-major"
    assert b.stride() == (1, b.shape[0]), "b must be column-major"
    assert b.shape[0] % 16 == b.shape[1] % 16 == 0
    assert not a.dtype == b.dtype == torch.float8_e5m2


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """torch._scaled_mm: one scale each, or a vector each."""
    _check_operands(a, b)
    if scale_a.numel() != 1 or scale_b.numel() != 1:
        assert scale_a.shape == (a.shape[0], 1)
        assert scale_b.shape == (1, b.shape[1])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert out_dtype == torch.bfloat16
    return ((a.double() * scale_a) @ (b.double() * scale_b)).to(out_dtype)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends float8 GEMMs to torch's calls, and these to the stand-ins."""
    choose_backend.cache_clear()
    # The CPU as a device that has what CUDA has, and no Triton.
    monkeypatch.setitem(backend.BACKENDS["float8_gemm"], "cpu", ("torch", "reference"))
    monkeypatch.setattr(backend, "_works", lambda name, *args: name in ("torch", "reference"))
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    yield
    choose_backend.cache_clear()


def _layer(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, emulate: bool = False
) -> dict[str, Tensor]:
    """The three results of a layer, and how many GEMMs ran."""
    t, k, n = shape
    generator = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(size, generator=generator) for size in ((t, k), (t, n), (n, k)))
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(w)
    linear.convert(model, PrecisionConfig(kind=kind, emulate=emulate))
    x = x.to(dtype).requires_grad_()
    with record_gemms() as executed:
        out = model(x)
        out.backward(g.to(dtype))
    grad_weight = model[0].weight.grad
    assert x.grad is not None
    assert grad_weight is not None
    results = {"output": out.detach(), "grad_input": x.grad, "grad_weight": grad_weight}
    return results | {"executed": torch.tensor(sum(executed.values()))}


@pytest.mark.usefixtures("on_torch")
def test_a_scale_of_one_is_filled_once_and_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A size that no other test has kept.
    generator, filled, ones = torch.Generator().manual_seed(0), [], torch.ones
    a, b = (torch.randn(208, 208, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    scale_a, scale = torch.rand(208, 1, generator=generator), torch.tensor([[0.5]])

    def counted(*size: Any, **keys: Any) -> Tensor:
        made = ones(*size, **keys)
        filled.append(tuple(made.shape))
        return made

    monkeypatch.setattr(torch, "ones", counted)
    for _ in range(2):
        out = cublaslt.scaled_mm(a, b.t(), scale_a, None, torch.bfloat16, fast=False)
        assert torch.equal(out, ((a.double() * scale_a) @ b.double().t()).to(torch.bfloat16))
        cublaslt.scaled_mm(a, b.t(), scale, scale, torch.bfloat16, fast=False)
    assert filled == [(1, 208)]


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize(
    ("kind", "dtype", "num_calls"),
    [
        ("float8_tensorwise", torch.float32, 3),
        ("float8_tensorwise", torch.bfloat16, 3),
        ("float8_rowwise", torch.float32, 0),
        ("float8_rowwise", torch.bfloat16, 1),
    ],
)
@pytest.mark.parametrize("shape", [(128, 256, 384), (16 * 8 + 128, 640, 128)])
def test_a_layer_computes_by_torchs_calls_what_the_reference_says(
    kind: str,
    dtype: torch.dtype,
    num_calls: int,
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = _layer(kind, shape, dtype, emulate=True)
    called: list[Any] = []

    def counted(*args: Any, **keys: Any) -> Any:
        called.append(args)
        return _scaled_mm(*args, **keys)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    actual = _layer(kind, shape, dtype)
    assert (len(called), actual["executed"]) == (num_calls, 3)
    for name in ("output", "grad_input", "grad_weight"):
        # The stand-ins sum in float64 and round once, the reference in float32 and then to the dtype.
        bound = 640 * 2.0**-24 + torch.finfo(dtype).eps
        assert noise.relative_error(actual[name], expected[name].double()) < bound, name
