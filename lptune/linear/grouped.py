"""LowPrecisionGroupedLinear: E linear layers of one shape as one module, each for its own rows of x, in low
precision. The experts of a mixture are two of them.

The weight is a matrix (E * N, K), the matrices of all groups one below the other. So all that is true of the
weight of a LowPrecisionLinear holds here: it is sharded by rows, also within a group, gathered in 8 bits, and
kept as a compute weight; a scale belongs to a row or to the whole. What differs is the three GEMMs
(kernels/grouped.py): each group multiplies its own rows, and contracts over them in grad_weight.

The rows of x are sorted by group. How many belong to a group is data: `ends` says where each group ends.

Shapes: S rows, E groups, K in_features, N out_features of one group, R = E * N.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.kernels import Quantized
from lptune.linear.kind import LinearSpec, Needs
from lptune.linear.module import (
    LowPrecisionLinear,
    QuantizedTokens,
    autocast,
    compute_weight,
    local_part,
)


class LowPrecisionGroupedLinear(LowPrecisionLinear):
    """A grouped linear layer whose three GEMMs run as `spec` says. Made by `adopt`, not by a call."""

    num_groups: int

    def forward(  # type: ignore[override]
        self, x: Tensor | QuantizedTokens, ends: Tensor, most: int | None = None
    ) -> Tensor:
        """(S, K) -> (S, N) in x's dtype. x: compute dtype, or quantized already. ends: int32 (E,), the last
        is S. most: no group has more rows than this (the number of tokens, if each token's experts differ);
        None: one may have all.
        """
        q = scale = None
        if isinstance(x, QuantizedTokens):
            x, q, scale = x
        return self._multiply(
            autocast(x), local_part(self.weight), self.handle, ends=ends, most=most, q=q, scale=scale
        )

    def _multiply(  # type: ignore[override]
        self,
        x: Tensor,
        weight_RK: Tensor,
        handle: Tensor,
        *,
        ends: Tensor,
        most: int | None,
        q: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """What a shadow pass puts something else in place of (steps/shadow.py)."""
        out_SN: Tensor = _GroupedGemms.apply(  # type: ignore[no-untyped-call]
            x, weight_RK, ends, handle, self.spec, most, q, scale
        )
        return out_SN


class _GroupedGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SK: Tensor,
        w_RK: Tensor,
        ends_E: Tensor,
        layer: Tensor,
        spec: LinearSpec,
        most: int | None,
        q: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        quantized_x = None if q is None or scale is None else Quantized(q, scale)
        weight_RK = compute_weight(w_RK, x_SK.dtype)
        out_SN, saved = spec.kind.grouped_forward(spec, x_SK, weight_RK, ends_E, layer, quantized_x)
        ctx.spec, ctx.most = spec, most
        ctx.save_for_backward(w_RK, ends_E, layer, *(saved if ctx.needs_input_grad[1] else ()))
        return out_SN

    @staticmethod
    def backward(ctx: Any, g_SN: Tensor) -> tuple[Tensor | None, ...]:
        w_RK, ends_E, layer, *saved = ctx.saved_tensors
        weight_RK = compute_weight(w_RK, g_SN.dtype)
        needs = Needs(*ctx.needs_input_grad[:2])
        gx_SK, gw_RK = ctx.spec.kind.grouped_backward(
            ctx.spec, g_SN.contiguous(), weight_RK, ends_E, tuple(saved), layer, needs, ctx.most
        )
        return gx_SK, gw_RK, *[None] * 6


# In compute dtype: where a GEMM is `high`, and to compare with.


def multiply_groups(x_SC: Tensor, w_RK: Tensor, ends_E: Tensor, *, by_rows: bool) -> Tensor:
    """Each group's rows of x times its matrix of w (E * N, K), transposed if `by_rows`."""
    w_ENK = w_RK.unflatten(0, (ends_E.shape[0], -1))
    w_ECD = w_ENK.transpose(1, 2) if by_rows else w_ENK
    if not len(x_SC):  # nobody has chosen these experts
        return torch.mm(x_SC, w_ECD[0])
    return F.grouped_mm(x_SC, w_ECD, offs=ends_E)


def grad_weight_of_groups(g_SN: Tensor, x_SK: Tensor, ends_E: Tensor) -> Tensor:
    """g.T @ x over each group's own rows, (E * N, K)."""
    if not len(g_SN):
        return g_SN.new_zeros(ends_E.shape[0] * g_SN.shape[1], x_SK.shape[1])
    return F.grouped_mm(g_SN.t(), x_SK, offs=ends_E).flatten(0, 1)
