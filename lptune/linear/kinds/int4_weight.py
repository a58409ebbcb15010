"""Training for INT4 servers: `int4_weight`, quantization-aware training of weights.

    W'          = W rounded to 4 bits, with a scale for each 32 columns of a row (numerics/groups.py)
    output      = x @ W'.T
    grad_input  = g @ W'
    grad_weight = g.T @ x     straight through the rounding, to the float32 master weight

A model that is rounded to 4 bits after its training loses what the rounding moves. Here every step sees the
rounded weights, and the master weights settle where rounding costs little (Jacob et al., arXiv:1712.05877;
the straight-through gradient is that of Bengio et al., arXiv:1308.3432). Training takes as much memory as in
high precision, and more time: the GEMMs run in the compute dtype, and W is rounded anew for each. An export
in INT4 has the codes and scales of the next step, bit for bit.

Shapes: T tokens, K in_features, N out_features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lptune.kernels import GRAD_INPUT, OUTPUT, Quantized, int4_weight_mm
from lptune.linear.kind import Kind, LinearSpec
from lptune.linear.shared_input import Once
from lptune.numerics import INT4_GROUP, quantize_groups


class Int4Weight(Kind):
    """`int4_weight`: all three GEMMs run in the compute dtype, two of them with W rounded to 4 bits."""

    name = "int4_weight"
    served_as = "int4"
    fmt = "int4"
    operations = ()  # no GEMM in 8 bits
    weight_group = INT4_GROUP

    def forward(
        self,
        spec: LinearSpec,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None,
        once: Once,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Kind. What it saves is x, for grad_weight."""
        assert quantized_x is None, "x is multiplied in compute dtype"
        if spec.output == "high":  # fell back
            return x_TK @ w_NK.t(), (x_TK,)
        return int4_weight_mm(x_TK, w_NK, True, layer, OUTPUT), (x_TK,)

    def backward(
        self,
        spec: LinearSpec,
        g_TN: Tensor,
        w_NK: Tensor,
        saved: tuple[Tensor, ...],
        layer: Tensor,
        needs_grad_input: bool,
        needs_grad_weight: bool,
        once: Once,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See Kind. grad_weight is the gradient of the rounded weight."""
        gx_TK = None
        if needs_grad_input:
            is_high = spec.grad_input == "high"
            gx_TK = g_TN @ w_NK if is_high else int4_weight_mm(g_TN, w_NK, False, layer, GRAD_INPUT)
        return gx_TK, g_TN.t() @ saved[0] if needs_grad_weight else None

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """See Kind. The values are codes of -7 to 7; the scales (N, ceil(K / 32))."""
        return Quantized(*quantize_groups(w_NK.to(compute_dtype)))

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.fmt} weight"

    def describe_gather(self, spec: LinearSpec) -> str:
        return "high"
