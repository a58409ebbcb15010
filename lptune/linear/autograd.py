"""The three GEMMs of a linear layer as one differentiable function.

The file of each kind (lptune/linear/kinds/) computes them. This file has what all kinds have in common:

- The weight is always cast to the compute dtype before it is quantized. So both orders give the same bits:
  gather in the compute dtype and then quantize, or quantize and then gather.
- Autograd saves the weight itself, not the 8-bit values that forward made of it. FSDP frees the weight after
  forward and gathers it again for backward; saved 8-bit values would keep the whole unsharded model in
  memory. Backward quantizes the weight again and gets the same bits. A weight that comes in 8 bits (a
  RowTensor) needs no quantizing: FSDP gathers it again, and one rank keeps it until the end of backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lptune.kernels import cast
from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.shared_input import SharedInput, alone
from lptune.linear.weights.row_tensor import RowTensor


class QuantizedTokens(NamedTuple):
    """Activations that were gathered in 8 bits, as input of layers that would quantize them the same way.

    Autograd gives 8-bit tensors no gradient. The gradient flows through `carrier`, which has no values.
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
    shared: SharedInput | None = None,
) -> Tensor:
    """Same as `x @ w.T` up to quantization. `spec` sets the precision of each of the three GEMMs.

    x_TK: compute dtype. w_NK: any float dtype, cast to x's dtype first; or a RowTensor, which is stored or
    gathered in 8 bits and is used unchanged. layer: the layer handle; kernels count GEMMs under its number.
    quantized_x: q and scale of x, if x was gathered in 8 bits (spec.token_gather); x_TK then only carries the
    gradient. shared: of the layers that read this x, by which x is quantized once for all of them; None: it
    is quantized for this layer. Returns (T, N) in x's dtype.
    """
    q, scale = quantized_x or (None, None)
    out_TN: Tensor = _LowPrecisionLinear.apply(  # type: ignore[no-untyped-call]
        x_TK, w_NK, layer, spec, q, scale, shared
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
        shared: SharedInput | None,
    ) -> Tensor:
        quantized_x = None if q is None or scale is None else (q, scale)
        weight_NK = compute_weight(w_NK, x_TK.dtype)
        once = alone if shared is None else shared.forward
        out_TN, saved = kind_of(spec).forward(spec, x_TK, weight_NK, layer, quantized_x, once)
        ctx.spec, ctx.shared = spec, None
        if shared is not None and ctx.needs_input_grad[1]:
            # Not all of `shared`: it would keep what forward made.
            ctx.shared = shared.backward
            shared.backward.readers += 1
        # x is for grad_weight alone, which a frozen weight does not have.
        ctx.save_for_backward(w_NK, layer, *(saved if ctx.needs_input_grad[1] else ()))
        return out_TN

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, layer, *saved = ctx.saved_tensors
        kind = kind_of(ctx.spec)
        weight_NK = compute_weight(w_NK, g_TN.dtype)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        gx_TK, gw_NK = kind.backward(
            ctx.spec,
            g_TN.contiguous(),
            weight_NK,
            tuple(saved),
            layer,
            needs_x,
            needs_w,
            ctx.shared or alone,
        )
        return gx_TK, gw_NK, None, None, None, None, None


def compute_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight by which a kind multiplies: w_NK in `dtype`; a RowTensor is used unchanged."""
    if isinstance(w_NK, RowTensor):  # stored or gathered in 8 bits
        return w_NK
    # After parallelize() or under FSDP the weight is cast already. The compiler cannot remove the op `cast`.
    return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)
