"""One scale per tensor: `int8_tensorwise`, `float8_tensorwise`, `float8_delayed`.

A scale that is the same everywhere leaves every sum, so each of x, W and g is quantized once and the same
8-bit tensor serves both GEMMs it takes part in. That is the cheapest kind, and the coarsest: one outlier
token decides the step of all others. Float8 forgives it more than INT8 does, since its step shrinks with the
value.

g takes e5m2 in float8 by default: gradients spread over more orders of magnitude than e4m3 holds
(arXiv:2209.05433).

`delayed` differs in where the scale comes from: the largest amax of past steps instead of this tensor's own,
so that no reduction has to come before quantizing (lptune/kernels/delayed.py).
"""

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    quantize_delayed,
    quantize_tensor,
    quantize_tensor_stochastic,
    scaled_mm,
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
    dtype, gx_TK, gw_NK = g_TN.dtype, None, None
    low_input = needs_grad_input and spec.grad_input != "high"
    low_weight = needs_grad_weight and spec.grad_weight != "high"
    g = _quantize(spec, g_TN, layer, "g") if low_input or low_weight else None
    if needs_grad_input:
        if g is not None and low_input:
            w = _quantize(spec, w_NK, layer, "w")
            gx_TK = scaled_mm(
                g.q_MK, w.q_MK, g.scale_11, w.scale_11, dtype, layer, GRAD_INPUT, emulate=spec.emulate
            )
        else:
            gx_TK = g_TN @ _high_weight(spec, w_NK, layer, dtype)
    if needs_grad_weight:
        if g is None or not low_weight:
            gw_NK = g_TN.t() @ saved[0]
        else:
            x = QuantizedTensor(*saved) if len(saved) == 2 else _quantize(spec, saved[0], layer, "x")
            gw_NK = scaled_mm(
                g.q_MK.t(), x.q_MK, g.scale_11, x.scale_11, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
            )
    return gx_TK, gw_NK


def _high_weight(spec: LinearSpec, w_NK: Tensor, layer: Tensor, dtype: torch.dtype) -> Tensor:
    """What a GEMM in compute dtype multiplies by."""
    return dequantize(_quantize(spec, w_NK, layer, "w"), dtype) if spec.high_uses_8_bit_weight else w_NK


def _quantize(spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str) -> QuantizedTensor:
    if isinstance(tensor, GatheredWeight):
        return QuantizedTensor(tensor.q_NK, tensor.scale)
    fmt = spec.grad_fmt if operand == "g" else spec.fmt
    if spec.scaling == "delayed":
        return quantize_delayed(tensor, fmt, layer, operand)
    if spec.stochastic and operand == "g":
        return quantize_tensor_stochastic(tensor, fmt, layer, power_of_two=spec.power_of_two)
    return quantize_tensor(tensor, fmt, power_of_two=spec.power_of_two)
