"""The three GEMMs of a linear layer as one differentiable function.

What they compute stands in the file of each kind (lptune/linear/kinds/). Here stands what kinds have in
common:

- the weight is cast to the compute dtype first and quantized from there, on every path: quantizing what was
  gathered in compute dtype and gathering what was quantized then give the same bits;
- backward keeps the weight itself, not its 8-bit copy: FSDP frees and gathers the weight's storage between
  forward and backward, while a saved copy would hold the whole unsharded model. Quantizing again gives the
  same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lptune.kernels import cast
from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.weights.row_tensor import RowTensor


class QuantizedTokens(NamedTuple):
    """Activations that came out of an 8-bit gather, for the layers that would have quantized them so.

    8-bit tensors have no gradient; `carrier` has it, and no values.
    """

    carrier_BSK: Tensor  # compute dtype, all elements one: only its shape and its gradient matter
    q_TK: Tensor  # int8 or float8, T = B * S
    scale: Tensor  # float32, (T, 1) or (1, 1)


def low_precision_linear(
    x_TK: Tensor,
    w_NK: Tensor,
    layer: Tensor,
    spec: LinearSpec,
    quantized_x: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`x @ w.T`, differentiable, with each of its three GEMMs as `spec` says.

    x_TK: compute dtype. w_NK: any float dtype; it is cast to x's dtype before anything else sees it.
    One that is stored or gathered in 8 bits is taken as it is.
    layer: `layer_handle` under which the executed GEMMs are counted. quantized_x: q and scale of x, where it
    was gathered so (spec.token_gather); x then only carries the gradient. Returns (T, N) in x's dtype.
    """
    q, scale = quantized_x or (None, None)
    out_TN: Tensor = _LowPrecisionLinear.apply(  # type: ignore[no-untyped-call]
        x_TK, w_NK, layer, spec, q, scale
    )
    return out_TN


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        spec: LinearSpec,
        q: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        quantized_x = None if q is None or scale is None else (q, scale)
        weight_NK = _compute_weight(w_NK, x_TK.dtype)
        out_TN, saved = kind_of(spec).forward(spec, x_TK, weight_NK, layer, quantized_x)
        ctx.spec = spec
        # x is for grad_weight alone, which a frozen weight does not have.
        ctx.save_for_backward(w_NK, layer, *(saved if ctx.needs_input_grad[1] else ()))
        return out_TN

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        w_NK, layer, *saved = ctx.saved_tensors
        kind = kind_of(ctx.spec)
        weight_NK = _compute_weight(w_NK, g_TN.dtype)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        gx_TK, gw_NK = kind.backward(
            ctx.spec, g_TN.contiguous(), weight_NK, tuple(saved), layer, needs_x, needs_w
        )
        return gx_TK, gw_NK, None, None, None, None


def _compute_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(w_NK, RowTensor):  # stored or gathered in 8 bits
        return w_NK
    # FSDP hands the weight over in compute dtype already. Without FSDP the cast must survive compilation.
    return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)
