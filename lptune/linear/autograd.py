"""The three GEMMs of a linear layer as one differentiable function.

What they compute stands in rowwise.py, tensorwise.py and blockwise.py, by what shares a scale, and in
weight_only.py, where the weight itself is stored in 8 bits. Here stands what they have in common:

- the weight is cast to the compute dtype first and quantized from there, on every path: quantizing what was
  gathered in compute dtype and gathering what was quantized then give the same bits;
- backward keeps the weight itself, not its 8-bit copy: FSDP frees and gathers the weight's storage between
  forward and backward, while a saved copy would hold the whole unsharded model. Quantizing again gives the
  same bits.
"""

from typing import Any

import torch
from torch import Tensor

from lptune.kernels import cast
from lptune.linear import blockwise, rowwise, tensorwise, weight_only
from lptune.linear.row_tensor import RowTensor
from lptune.linear.spec import LinearSpec

_MATHS: dict[str, Any] = {
    "rowwise": rowwise,
    "tensorwise": tensorwise,
    "delayed": tensorwise,
    "blockwise": blockwise,
    "mx": blockwise,
    "weight_only": weight_only,
}


def low_precision_linear(x_TK: Tensor, w_NK: Tensor, layer: Tensor, spec: LinearSpec) -> Tensor:
    """`x @ w.T`, differentiable, with each of its three GEMMs as `spec` says.

    x_TK: compute dtype. w_NK: any float dtype; it is cast to x's dtype before anything else sees it.
    For `weight_only` an Int8Weight, as it is.
    layer: `layer_handle` under which the executed GEMMs are counted. Returns (T, N) in x's dtype.
    """
    out_TN: Tensor = _LowPrecisionLinear.apply(x_TK, w_NK, layer, spec)  # type: ignore[no-untyped-call]
    return out_TN


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, layer: Tensor, spec: LinearSpec) -> Tensor:
        maths = _MATHS[spec.scaling]
        out_TN, saved = maths.forward(spec, x_TK, _compute_weight(w_NK, x_TK.dtype), layer)
        ctx.spec = spec
        ctx.save_for_backward(w_NK, layer, *saved)
        return out_TN  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        w_NK, layer, *saved = ctx.saved_tensors
        maths = _MATHS[ctx.spec.scaling]
        weight_NK = _compute_weight(w_NK, g_TN.dtype)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        gx_TK, gw_NK = maths.backward(
            ctx.spec, g_TN.contiguous(), weight_NK, tuple(saved), layer, needs_x, needs_w
        )
        return gx_TK, gw_NK, None, None


def _compute_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(w_NK, RowTensor):  # stored or gathered in 8 bits
        return w_NK
    # FSDP hands the weight over in compute dtype already. Without FSDP the cast must survive compilation.
    return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)
