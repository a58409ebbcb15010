"""`float8_blockwise` (DeepSeek-V3, arXiv:2412.19437): blocks of 128 elements, of 128 x 128 in W.

    output         x 1 x 128,   W 128 x 128
    grad_input     g 1 x 128,   W 128 x 128 (the same)
    grad_weight    g 128 x 1,   x 128 x 1

Square blocks let `output` and `grad_input` use the same 8-bit values of W. A shard of W can end inside a
block, so ranks agree on the amaxes of blocks before they quantize their rows for a gather.
"""

from torch import Tensor

from lptune.config import KindKeys
from lptune.kernels import Quantized, quantize_blocks, quantize_row_and_column_blocks
from lptune.linear.kind import Agree, LinearSpec
from lptune.linear.kinds.blockwise import Blockwise
from lptune.linear.weights.weight_amax import Shard, quantize_by_agreement
from lptune.numerics import QuantizedBlocks


class Float8Blockwise(Blockwise):
    """One scale per 128 elements along the contraction in x and g, and per 128 x 128 elements in W."""

    name = "float8_blockwise"
    keys = KindKeys(("block", "high"), ("block", "high"), ("e4m3",), can_gather_low=True, needs_float8=True)
    fmt = "e4m3"
    operations = ("block_gemm",)
    size = 128
    weight_block = 128

    def quantize(self, tensor: Tensor, dim: int, fmt: str, *, transposed: bool = False) -> QuantizedBlocks:
        block = (1, self.size) if dim == 1 else (self.size, 1)
        return quantize_blocks(tensor, block, fmt, transposed=transposed)

    def quantize_weight(
        self, w_NK: Tensor, dim: int, fmt: str, *, transposed: bool = False
    ) -> QuantizedBlocks:
        return quantize_blocks(w_NK, (self.size, self.size), fmt, transposed=transposed)

    def quantize_gradient(
        self, g_TN: Tensor, fmt: str, *, transposed: bool
    ) -> tuple[QuantizedBlocks, QuantizedBlocks]:
        return quantize_row_and_column_blocks(g_TN, self.size, fmt, transposed=transposed)

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        return quantize_by_agreement(shard, spec.fmt, agree)

    def weight_scale_block(self, n: int, k: int) -> tuple[int, int]:
        return self.size, self.size


KIND = Float8Blockwise()
