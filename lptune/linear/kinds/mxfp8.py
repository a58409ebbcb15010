"""`mxfp8` (OCP Microscaling): blocks of 32 elements, each with an 8-bit exponent as its scale.

    output         x, W in blocks of 32 along K
    grad_input     g, W in blocks of 32 along N
    grad_weight    g, x in blocks of 32 along T

Blocks are vectors, so W is quantized once along K and once along N: no one set of 8-bit values serves both,
and there is no 8-bit gather. Only Blackwell multiplies such blocks; elsewhere the GEMMs are emulated unasked,
since the kind is worth trying before the hardware for it is there. The plan says so.
"""

from torch import Tensor

from lptune.config import KindKeys
from lptune.kernels import quantize_mx, quantize_mx_rows_and_columns
from lptune.linear.kinds.blockwise import Blockwise
from lptune.numerics import MX_BLOCK, QuantizedBlocks


class Mxfp8(Blockwise):
    """One scale per vector of 32 elements in x, W and g."""

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
