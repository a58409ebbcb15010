"""torchao's layers and ours, run with every operand of their GEMMs recorded (test_torchao.py)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchao.float8.float8_linear as ao_linear
import torchao.prototype.quantized_training.int8_mixed_precision as ao_int8
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.kernels import GEMMS
from lptune.linear.kinds import blockwise, rowwise, tensorwise
from lptune.numerics import Format
from tests.proofs.noise import predicted_relative_error, relative_error, sqnr_db

T, K, N = 96, 128, 80
DTYPES = (torch.float32, torch.bfloat16)
# The largest relative error of one rounding, where numbers are normal.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Operands(NamedTuple):
    """What one GEMM gets. Scales dequantize, float32, (M, 1) or (1, 1) and (1, N) or (1, 1)."""

    a_MK: Tensor
    b_KN: Tensor
    scale_a: Tensor
    scale_b: Tensor


class Run(NamedTuple):
    """Of one forward and backward, by the name of the GEMM; operands of those in 8 bits."""

    results: dict[str, Tensor]
    operands: dict[str, Operands]


def randn(m: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_inputs(dtype: torch.dtype, t: int = T, k: int = K, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """x, W, g."""
    return randn(t, k, dtype, 1), randn(n, k, dtype, 2) * k**-0.5, randn(t, n, dtype, 3) * 1e-3


def layer(w_NK: Tensor) -> nn.Sequential:
    """A model of one nn.Linear with this weight."""
    with torch.device("meta"):
        only = nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=False, dtype=w_NK.dtype)
    only.weight = nn.Parameter(w_NK.clone())
    return nn.Sequential(only)


def forward_backward(model: nn.Module, x_TK: Tensor, g_TN: Tensor) -> dict[str, Tensor]:
    """The result of each GEMM."""
    x_TK = x_TK.clone().requires_grad_()
    (weight,) = model.parameters()
    out_TN = model(x_TK)
    gx_TK, gw_NK = torch.autograd.grad(out_TN, (x_TK, weight), g_TN)
    return dict(zip(GEMMS, (out_TN.detach(), gx_TK, gw_NK), strict=True))


def run_ours(monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...], **precision: Any) -> Run:
    """Our layer, emulated. precision: keys of PrecisionConfig."""
    x_TK, w_NK, g_TN = inputs
    model = layer(w_NK)
    linear.convert(model, PrecisionConfig(emulate=True, **precision))
    operands: dict[str, Operands] = {}

    def recorded(mm: Callable[..., Tensor], num_sizes: int) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **keys: Any) -> Tensor:
            operands[GEMMS[args[6 + num_sizes]]] = Operands(*args[:4])
            return mm(*args, **keys)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(rowwise, "scaled_mm", recorded(rowwise.scaled_mm, 0))
        patch.setattr(tensorwise, "scaled_mm", recorded(tensorwise.scaled_mm, 0))
        patch.setattr(blockwise, "block_scaled_mm", recorded(blockwise.block_scaled_mm, 1))
        return Run(forward_backward(model, x_TK, g_TN), operands)


def run_float8_peer(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...], config: Float8LinearConfig
) -> Run:
    """The peer's float8 layer, emulated."""
    x_TK, w_NK, g_TN = inputs
    model = convert_to_float8_training(layer(w_NK), config=dataclasses.replace(config, emulate=True))
    cast, casts = ao_linear.hp_tensor_to_float8_dynamic, []

    def recorded(*args: Any, **keys: Any) -> Tensor:
        casts.append(cast(*args, **keys))
        return casts[-1]  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(ao_linear, "hp_tensor_to_float8_dynamic", recorded)
        results = forward_backward(model, x_TK, g_TN)
    # x and W.T, then g and W.T, then g and x unless that GEMM is in compute dtype. Its scales quantize.
    q = [(c._data, (1 / c._scale.double()).float().reshape(c._scale.shape or (1, 1))) for c in casts]
    operands = {
        "output": Operands(q[0][0], q[1][0], q[0][1], q[1][1]),
        "grad_input": Operands(q[2][0], q[3][0].t(), q[2][1], q[3][1].t()),
    }
    if len(q) > 4:
        operands["grad_weight"] = Operands(q[4][0].t(), q[5][0], q[4][1].t(), q[5][1])
    return Run(results, operands)


def truth_of(inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    x_TK, w_NK, g_TN = (each.double() for each in inputs)
    return {"output": x_TK @ w_NK.t(), "grad_input": g_TN @ w_NK, "grad_weight": g_TN.t() @ x_TK}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """For the values of an 8-bit operand: 0 and -0 differ."""
    assert a.dtype == b.dtype
    assert a.dtype.itemsize == 1
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def sum_of_magnitudes(operands: Operands) -> Tensor:
    a64, b64 = (q.double() * s.double() for q, s in ((operands[0], operands[2]), (operands[1], operands[3])))
    return a64.abs() @ b64.abs()


def assert_within(actual: Tensor, expected: Tensor, difference: Tensor, dtype: torch.dtype) -> None:
    """|actual - expected| <= difference, and what rounding both to `dtype` adds."""
    rounding = 0.0 if dtype == torch.float32 else UNIT[dtype]
    bound = difference * (1 + rounding) + rounding * (actual.double().abs() + expected.double().abs())
    excess = (actual.double() - expected.double()).abs() - bound * (1 + 1e-6)
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} of {excess.numel()}, by {float(excess.max()):.3g}"


def assert_really_low(run: Run, inputs: tuple[Tensor, ...], noise: dict[str, float]) -> None:
    """The peer ran in 8 bits: its error is the predicted noise, no more and not much less (none: a no-op)."""
    truth, unit = truth_of(inputs), UNIT[inputs[0].dtype]
    for gemm, predicted in noise.items():
        error = relative_error(run.results[gemm], truth[gemm])
        assert math.isfinite(sqnr_db(run.results[gemm], truth[gemm])), gemm
        # 5 % for the spread of a norm over so many products, as in test_linear.py; up to 4 roundings of it.
        assert predicted / 2 < error < 1.05 * predicted + 4 * unit, gemm


def noise_of(*operands: tuple[Tensor, Any, Format, bool]) -> float:
    """Predicted noise of a GEMM: its operands', added as variances."""
    parts = [predicted_relative_error(x, dim, fmt, power_of_two=power) for x, dim, fmt, power in operands]
    return math.sqrt(sum(part**2 for part in parts))


def run_int8_peer(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...], **patches: Callable[..., Any]
) -> Run:
    """The peer's layer; patches replace functions of its module."""
    x_TK, w_NK, g_TN = inputs
    model = layer(w_NK)
    # Without module_swap the conversion computes in the input's dtype and says nothing.
    quantize_(model, ao_int8.Int8MixedPrecisionTrainingConfig(module_swap=True))
    calls: list[Operands] = []
    with monkeypatch.context() as patch:
        for name, function in patches.items():
            patch.setattr(ao_int8, name, function)
        mm = ao_int8.scaled_int8_mm

        def recorded(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
            calls.append(Operands(a, b, scale_a.float()[:, None], scale_b.float()[None]))
            return mm(a, b, scale_a, scale_b)  # type: ignore[no-any-return]

        patch.setattr(ao_int8, "scaled_int8_mm", recorded)
        results = forward_backward(model, x_TK, g_TN)
    output, grad_input, gw = calls  # three GEMMs and no fewer; the last as (x.T @ g).T
    grad_weight = Operands(gw.b_KN.t(), gw.a_MK.t(), gw.scale_b.t(), gw.scale_a.t())
    return Run(results, dict(zip(GEMMS, (output, grad_input, grad_weight), strict=True)))


def exact_epilogue(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The peer's CUDA epilogue: both scales in float32, one rounding to the scales' dtype."""
    accumulator = (a.double() @ b.double()).float()
    return (accumulator * scale_a.float()[:, None] * scale_b.float()).to(scale_a.dtype)


def run_blockwise_peer(monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...]) -> Run:
    """The peer's autograd function with its kernels replaced by what runs on a CPU.

    Its quantizers are Triton; their references in plain torch, the peer's own, take their place. It has no
    reference of a GEMM: operands dequantized to float64, which is what any of its GEMMs approximates.
    """
    pytest.importorskip("triton", reason="torchao's blockwise module imports triton")
    import torchao.prototype.blockwise_fp8_training.kernels as kernels
    import torchao.prototype.blockwise_fp8_training.linear as ao_blockwise

    quantize_act, quantize_act_rhs, quantize_weight = (
        kernels.torch_blockwise_scale_act_quant_lhs,
        kernels.torch_blockwise_scale_act_quant_rhs,
        kernels.torch_blockwise_scale_weight_quant,
    )
    calls: list[Operands] = []

    def mm(
        *, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **keys: Any
    ) -> Tensor:
        in_our_layout = keys.get("triton_scale_b")  # of grad_weight; scale_b is its transpose there
        calls.append(Operands(mat_a, mat_b, scale_a, scale_b if in_our_layout is None else in_our_layout))
        a64, b64 = dequantized_blocks(calls[-1])
        return (a64 @ b64).to(out_dtype)

    def quantize_act_transposed(g_TN: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        return quantize_act(g_TN.t().contiguous(), block_size)  # type: ignore[no-any-return]

    def quantize_weight_transposed(w_NK: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        q, scale = quantize_weight(w_NK, block_size)
        return q.t(), scale.t()

    stand_ins: dict[str, Callable[..., Any]] = {
        "triton_fp8_blockwise_act_quant_lhs": quantize_act,
        "triton_fp8_blockwise_act_quant_rhs": quantize_act_rhs,
        "triton_fp8_blockwise_act_quant_transposed_lhs": quantize_act_transposed,
        "triton_fp8_blockwise_weight_quant_rhs": lambda w, block_size: quantize_weight(w, block_size),
        "triton_fp8_blockwise_weight_quant_transposed_rhs": quantize_weight_transposed,
        "_run_blockwise_mm": mm,
    }

    class Layer(nn.Linear):  # the peer's own refuses to be made without a GPU
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = ao_blockwise.fp8_blockwise_mm.apply(x, self.weight, 128, x.dtype)
            return out

    x_TK, w_NK, g_TN = inputs
    model = layer(w_NK)
    model[0].__class__ = Layer
    with monkeypatch.context() as patch:
        for name, function in stand_ins.items():
            patch.setattr(ao_blockwise, name, function)  # raises where the peer has no such name any more
        results = forward_backward(model, x_TK, g_TN)
    return Run(results, dict(zip(GEMMS, calls, strict=True)))


def dequantized_blocks(operands: Operands) -> tuple[Tensor, Tensor]:
    """Both operands of a GEMM in blocks of 128, float64."""
    n = operands.b_KN.shape[1]
    scale_b = operands.scale_b.double().repeat_interleave(128, 0)
    if scale_b.shape[1] != n:
        scale_b = scale_b.repeat_interleave(128, 1)
    a64 = operands.a_MK.double() * operands.scale_a.double().repeat_interleave(128, 1)
    return a64, operands.b_KN.double() * scale_b
