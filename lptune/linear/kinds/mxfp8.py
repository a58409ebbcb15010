"""`mxfp8` (OCP Microscaling): blocks of 32 elements, each with a power of two, stored in 8 bits, as scale.

    output         x, W in blocks of 32 along K
    grad_input     g, W in blocks of 32 along N
    grad_weight    g, x in blocks of 32 along T

Blocks are vectors, so W is quantized along K for `output` and again along N for `grad_input`. No single set
of 8-bit values serves both, so this kind has no 8-bit gather. Only Blackwell GPUs have GEMMs for such blocks.
On other devices the GEMMs are emulated, so that the kind can be tried without such a GPU; the plan says so.
"""

from torch import Tensor

from lptune.config import KindKeys
from lptune.kernels import quantize_mx, quantize_mx_rows_and_columns
from lptune.linear.kinds.blockwise import Blockwise
from lptune.numerics import MX_BLOCK, QuantizedBlocks


class Mxfp8(Blockwise):
    """One scale per 32 elements along the contraction in x, W and g."""

    name = "mxfp8"
    keys = KindKeys(("block", "high"), ("block", "high"), ("e4m3",))
    fmt = "e4m3"
    power_of_two = True
    operations = ("other_block_gemm",)
    emulated_where_missing = True
    size = MX_BLOCK

    def quantize(self, tensor: Tensor, dim: int, fmt: str, *, transposed: bool = False) -> QuantizedBlocks:
        return QuantizedBlocks(*quantize_mx(tensor, dim, fmt, transposed=transposed))

    def quantize_weight(
        self, w_NK: Tensor, dim: int, fmt: str, *, transposed: bool = False
    ) -> QuantizedBlocks:
        return self.quantize(w_NK, dim, fmt, transposed=transposed)

    def quantize_gradient(
        self, g_TN: Tensor, fmt: str, *, transposed: bool
    ) -> tuple[QuantizedBlocks, QuantizedBlocks]:
        along_n, along_t = quantize_mx_rows_and_columns(g_TN, fmt, transposed=transposed)
        return QuantizedBlocks(*along_n), QuantizedBlocks(*along_t)

    def weight_scale_block(self, n: int, k: int) -> tuple[int, int]:
        return 1, self.size


KIND = Mxfp8()
