"""One scale per tensor: `int8_tensorwise`, `float8_tensorwise`, `float8_delayed`.

A scale that is the same everywhere leaves every sum, so each of x, W and g is quantized once and the same
8-bit tensor serves both GEMMs it takes part in. That is the cheapest kind, and the coarsest: one outlier
token decides the step of all others. Float8 forgives it more than INT8 does, since its step shrinks with the
value.

g takes e5m2 in float8 by default: gradients spread over more orders of magnitude than e4m3 holds
(arXiv:2209.05433).

Where the device wants both operands of a GEMM contiguous along the contraction, g, W and x have to be stored
the other way round for the two GEMMs of backward; g both ways, in one pass.

`delayed` differs in where the scale comes from: the largest amax of past steps instead of this tensor's own,
so that no reduction has to come before quantizing (lptune/kernels/delayed.py).
"""

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    k_major,
    quantize_delayed,
    quantize_tensor,
    quantize_tensor_both_ways,
    quantize_tensor_stochastic,
    scaled_mm,
    transposed_copy,
)
from lptune.linear.master_weight import GatheredWeight
from lptune.linear.spec import LinearSpec
from lptune.numerics import QuantizedTensor, dequantize


def forward(
    spec: LinearSpec,
    x_TK: Tensor,
    w_NK: Tensor,
    layer: Tensor,
    quantized_x: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(`x @ w.T` in x's dtype, what `backward` needs of x). w_NK has x's dtype.

    quantized_x: of x, if it is there already; where `output` and `grad_weight` are low alone.
    """
    if spec.output == "high":
        return x_TK @ _high_weight(spec, w_NK, layer, x_TK.dtype).t(), (x_TK,)
    x = QuantizedTensor(*quantized_x) if quantized_x else _quantize(spec, x_TK, layer, "x")
    w = _quantize(spec, w_NK, layer, "w")
    out_TN = scaled_mm(
        x.q_MK, w.q_MK.t(), x.scale_11, w.scale_11, x_TK.dtype, layer, OUTPUT, emulate=spec.emulate
    )
    # x itself and not its 8-bit copy, unless that is shared: q, k and v share one x, and each would keep a
    # copy of its own.
    return out_TN, quantized_x or (x_TK,)


def backward(
    spec: LinearSpec,
    g_TN: Tensor,
    w_NK: Tensor,
    saved: tuple[Tensor, ...],
    layer: Tensor,
    needs_grad_input: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input, grad_weight) in g's dtype; None where not needed. g_TN, w_NK: same dtype."""
    dtype, transposed, gx_TK, gw_NK = g_TN.dtype, k_major(g_TN.device), None, None
    low_input = needs_grad_input and spec.grad_input != "high"
    low_weight = needs_grad_weight and spec.grad_weight != "high"
    g, g_transposed = _gradient(spec, g_TN, layer, low_input, low_weight, transposed)
    if needs_grad_input:
        if g is None:
            gx_TK = g_TN @ _high_weight(spec, w_NK, layer, dtype)
        else:
            w = _quantize(spec, w_NK, layer, "w", transposed)
            gx_TK = scaled_mm(
                g.q_MK, w.q_MK, g.scale_11, w.scale_11, dtype, layer, GRAD_INPUT, emulate=spec.emulate
            )
    if needs_grad_weight:
        if g_transposed is None:
            gw_NK = g_TN.t() @ saved[0]
        else:
            x = _saved(spec, saved, layer, transposed)
            g_NT, scale_11 = g_transposed.q_MK.t(), g_transposed.scale_11
            gw_NK = scaled_mm(
                g_NT, x.q_MK, scale_11, x.scale_11, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
            )
    return gx_TK, gw_NK


def _gradient(
    spec: LinearSpec, g_TN: Tensor, layer: Tensor, for_input: bool, for_weight: bool, transposed: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """g as grad_input multiplies it, row by row, and as grad_weight does; None where it is not wanted."""
    if transposed and for_input and for_weight and spec.scaling != "delayed" and not spec.stochastic:
        return quantize_tensor_both_ways(g_TN, spec.grad_fmt, power_of_two=spec.power_of_two)
    if transposed and for_weight and not for_input:
        return None, _quantize(spec, g_TN, layer, "g", transposed)
    g = _quantize(spec, g_TN, layer, "g") if for_input or for_weight else None
    g_transposed = g._replace(q_MK=transposed_copy(g.q_MK)) if g and transposed and for_weight else g
    return g if for_input else None, g_transposed if for_weight else None


def _saved(spec: LinearSpec, saved: tuple[Tensor, ...], layer: Tensor, transposed: bool) -> QuantizedTensor:
    """x as grad_weight multiplies it."""
    if len(saved) == 1:
        return _quantize(spec, saved[0], layer, "x", transposed)
    q_TK, scale_11 = saved
    return QuantizedTensor(transposed_copy(q_TK) if transposed else q_TK, scale_11)


def _high_weight(spec: LinearSpec, w_NK: Tensor, layer: Tensor, dtype: torch.dtype) -> Tensor:
    """What a GEMM in compute dtype multiplies by."""
    return dequantize(_quantize(spec, w_NK, layer, "w"), dtype) if spec.high_uses_8_bit_weight else w_NK


def _quantize(
    spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str, transposed: bool = False
) -> QuantizedTensor:
    if isinstance(tensor, GatheredWeight):
        return QuantizedTensor(transposed_copy(tensor.q_NK) if transposed else tensor.q_NK, tensor.scale)
    fmt = spec.grad_fmt if operand == "g" else spec.fmt
    if spec.scaling == "delayed":
        return quantize_delayed(tensor, fmt, layer, operand, transposed=transposed)
    if spec.stochastic and operand == "g":
        rounded = quantize_tensor_stochastic(tensor, fmt, layer, power_of_two=spec.power_of_two)
        return rounded._replace(q_MK=transposed_copy(rounded.q_MK)) if transposed else rounded
    return quantize_tensor(tensor, fmt, power_of_two=spec.power_of_two, transposed=transposed)
