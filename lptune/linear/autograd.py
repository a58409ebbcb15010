"""The three GEMMs of a linear layer in INT8, and where each scale goes.

    output      = x @ W.T    contracts over K: rows of x, rows of W        one scale per row of each
    grad_input  = g @ W      contracts over N: rows of g, columns of W
    grad_weight = g.T @ x    contracts over T: columns of g, columns of x  one scale per column of each

A scale can leave the sum only where it is constant along the contraction. W was quantized by rows for
`output`, and in `grad_input` those scales vary along the contraction. They are pushed into the other operand
instead:

    g @ (q * s) = (g * s.T) @ q        `folded`

so g * s.T is quantized by rows and multiplied by the very int8 weight that forward used: W is rounded once,
not twice. That matters under an 8-bit all-gather, where the original weight is not there to be quantized by
column. The same identity in `grad_weight`, g.T @ (q * s) = (g * s).T @ q, allows x to be saved in 8 bits;
outlier channels of x then share a scale with ordinary ones, so it is an option and `column` the default
(docs/numerics.md).

Backward keeps the weight itself, not its int8 copy: FSDP frees and gathers the weight's storage between
forward and backward, while a saved copy would hold the whole unsharded model. Quantizing again gives the same
bits.
"""

from typing import Any

import torch
from torch import Tensor

from lptune.kernels import cast, int8_scaled_mm
from lptune.numerics import dequantize, quantize_columns, quantize_rows

_OUTPUT, _GRAD_INPUT, _GRAD_WEIGHT = range(3)


def int8_rowcol_linear(
    x_TK: Tensor, w_NK: Tensor, layer: Tensor, output: str, grad_input: str, grad_weight: str
) -> Tensor:
    """`x @ w.T`, differentiable, with each of its three GEMMs as `LinearSpec` says.

    x_TK: compute dtype. w_NK: any float dtype; it is cast to x's dtype before anything else sees it.
    layer: `layer_handle` under which the executed GEMMs are counted.
    """
    out_TN: Tensor = _Int8RowColLinear.apply(x_TK, w_NK, layer, output, grad_input, grad_weight)  # type: ignore[no-untyped-call]
    return out_TN


class _Int8RowColLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, w_NK: Tensor, layer: Tensor, output: str, grad_input: str, grad_weight: str
    ) -> Tensor:
        ctx.grad_input, ctx.grad_weight = grad_input, grad_weight
        weight_NK = _compute_weight(w_NK, x_TK.dtype)
        need_x_rows = output == "low" or grad_weight == "folded"
        x = quantize_rows(x_TK) if need_x_rows else None
        if output == "low":
            assert x is not None
            w = quantize_rows(weight_NK)
            out_TN = int8_scaled_mm(
                x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t(), x_TK.dtype, layer, _OUTPUT
            )
        else:
            out_TN = x_TK @ weight_NK.t()
        if grad_weight == "folded":
            assert x is not None
            ctx.save_for_backward(w_NK, layer, x.q_MK, x.scale_M1)
        else:
            ctx.save_for_backward(w_NK, layer, x_TK)
        return out_TN

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        w_NK, layer, *x_saved = ctx.saved_tensors
        g_TN = g_TN.contiguous()
        gx_TK = gw_NK = None
        if ctx.needs_input_grad[0]:
            gx_TK = _grad_input(ctx.grad_input, g_TN, _compute_weight(w_NK, g_TN.dtype), layer)
        if ctx.needs_input_grad[1]:
            gw_NK = _grad_weight(ctx.grad_weight, g_TN, x_saved, layer)
        return gx_TK, gw_NK, None, None, None, None


def _compute_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    # FSDP hands the weight over in compute dtype already. Without FSDP the cast must survive compilation.
    return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)


def _grad_input(how: str, g_TN: Tensor, w_NK: Tensor, layer: Tensor) -> Tensor:
    dtype = g_TN.dtype
    if how == "column":
        g, w_column = quantize_rows(g_TN), quantize_columns(w_NK)
        return int8_scaled_mm(g.q_MK, w_column.q_MK, g.scale_M1, w_column.scale_1K, dtype, layer, _GRAD_INPUT)
    w_row = quantize_rows(w_NK)
    if how == "high":
        # The dequantized weight, not the original: what backward sees must not depend on how it was gathered.
        return g_TN @ dequantize(w_row, dtype)
    if how == "requantized":
        g, w_column = quantize_rows(g_TN), quantize_columns(dequantize(w_row, dtype))
        return int8_scaled_mm(g.q_MK, w_column.q_MK, g.scale_M1, w_column.scale_1K, dtype, layer, _GRAD_INPUT)
    assert how == "folded", how
    folded = quantize_rows(g_TN.to(torch.float32) * w_row.scale_M1.t())
    return int8_scaled_mm(folded.q_MK, w_row.q_MK, folded.scale_M1, None, dtype, layer, _GRAD_INPUT)


def _grad_weight(how: str, g_TN: Tensor, x_saved: list[Tensor], layer: Tensor) -> Tensor:
    dtype = g_TN.dtype
    if how == "folded":
        xq_TK, x_scale_T1 = x_saved
        folded = quantize_columns(g_TN.to(torch.float32) * x_scale_T1)
        return int8_scaled_mm(folded.q_MK.t(), xq_TK, folded.scale_1K.t(), None, dtype, layer, _GRAD_WEIGHT)
    (x_TK,) = x_saved
    if how == "high":
        return g_TN.t() @ x_TK
    assert how == "column", how
    g, x = quantize_columns(g_TN), quantize_columns(x_TK)
    return int8_scaled_mm(g.q_MK.t(), x.q_MK, g.scale_1K.t(), x.scale_1K, dtype, layer, _GRAD_WEIGHT)
