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

from lptune.kernels import Quantized, int4_weight_mm
from lptune.linear.kind import LinearSpec
from lptune.linear.kinds.weight_only import WeightOnly
from lptune.numerics import INT4_GROUP, quantize_groups


class Int4Weight(WeightOnly):
    """`int4_weight`: all three GEMMs run in the compute dtype, two of them with W rounded to 4 bits."""

    name = "int4_weight"
    served_as = "int4"
    fmt = "int4"
    weight_group = INT4_GROUP

    def multiply(self, a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
        """See WeightOnly. w_NK: of a's dtype."""
        return int4_weight_mm(a_TM, w_NK, transposed, layer, gemm)

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """See Kind. The values are codes of -7 to 7; the scales (N, ceil(K / 32))."""
        return Quantized(*quantize_groups(w_NK.to(compute_dtype)))

    def describe_gather(self, spec: LinearSpec) -> str:
        return "high"
