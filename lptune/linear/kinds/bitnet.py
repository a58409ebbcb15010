"""The kind with ternary weights: `bitnet`, BitNet b1.58 (arXiv:2402.17764, arXiv:2504.12285).

    W' = q_W * s_W    q_W: -1, 0 or 1; one scale for W, the mean of |W| (numerics/ternary.py)
    x' = q_x * s_x    INT8 with one scale for each row, as in `int8_rowcol`

    output      = x' @ W'.T   an INT8 GEMM: ternary codes are INT8 codes
    grad_input  = g @ W'      high; `folded`: g * s_W in INT8 by rows, by the codes of W
    grad_weight = g.T @ x'    high; `folded`: g * s_x in INT8 by columns, by the codes of x

The gradients are those of the rounded function, and pass straight through both roundings to x and to the
float32 master. BitNet is trained with gradients in high precision, so `high` is the default: one GEMM of the
three runs in INT8. `folded` rounds g alone, since W' and x' are what they are, and all three GEMMs run in
INT8. x is saved for backward as its codes.

W' has three values, so almost all of what W was is lost, and a trained model does not survive it: BitNet is
for training from scratch, or for long training that repairs the model. What it brings is served: 2 bits a
weight, and sums in place of products. The models of the papers have a norm before each of their output
projections and other activations; those belong to a model, and this kind is for the layers of any.

A gather sends 2 bits a weight. The mean covers rows of all ranks. They exchange sums of rows where other
kinds exchange amaxes (weights/weight_amax.py): each has zeros for the rows that it lacks, so the maximum over
ranks puts them together, and each computes the same mean.

Shapes: T tokens, K in_features, N out_features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import Packed, Quantized, quantize_ternary, unpack_ternary
from lptune.linear.kind import Agree, Kind, LinearSpec, Shard
from lptune.linear.kinds.rowwise import Rowwise
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.linear.weights.weight_amax import shard_amaxes
from lptune.numerics import TERNARY_PACKED, QuantizedRows, pack_ternary, ternary_scale


class Bitnet(Rowwise):
    """`bitnet`: ternary weights with one scale, INT8 tokens; `output` is an INT8 GEMM."""

    name = "bitnet"
    served_as = "bitnet"
    fmt = "int8"
    operations = ("int8_gemm",)
    row_scales = False
    mean_scale = True
    weights_in_byte = TERNARY_PACKED
    saves_rounded_x = True

    def weight_rows(self, spec: LinearSpec, w_NK: Tensor, transposed: bool = False) -> QuantizedRows:
        if isinstance(w_NK, GatheredWeight):
            q_NK, scale_11 = unpack_ternary(w_NK.q_NK, transposed=transposed), w_NK.scale
        else:
            q_NK, scale_11 = quantize_ternary(w_NK, transposed=transposed)
        return QuantizedRows(q_NK, scale_11.expand(len(q_NK), 1).contiguous())

    def why_not_grouped(self, spec: LinearSpec) -> str | None:
        return "experts in one tensor would share the one scale of a ternary weight"

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"int8 x ternary{'' if gemm == 'output' else ' folded'}"

    def describe_gather(self, spec: LinearSpec) -> str:
        return "int8 ternary, 2 bits"

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        """See Kind. The values are packed, (N, K / 4) in uint8."""
        (sums_N1,) = shard_amaxes([shard])
        rows_MK = shard.rows_MK.to(shard.compute_dtype)
        scale_11 = ternary_scale(agree(sums_N1), rows_MK.shape[1])
        q_MK = numerics.quantize_ternary(rows_MK, scale_11).q_MK
        return Quantized(pack_ternary(q_MK, 1), scale_11)

    def pack_shard(self, spec: LinearSpec, shard: Shard, agree: Agree, num_rows: int) -> Packed:
        return Kind.pack_shard(self, spec, shard, agree, num_rows)

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """See Kind. The values are codes of -1 to 1, not packed."""
        return Quantized(*numerics.quantize_ternary(w_NK.to(compute_dtype)))
