"""Ternary weights as custom ops (numerics/ternary.py), so that eager and compiled layers have the same codes.

Both are plain torch on every device: some passes over W for each GEMM that multiplies by it. `transposed`
stores codes column by column, as in quantize.py.
"""

from torch import Tensor

from lptune import numerics
from lptune.kernels.layout import empty_q, empty_tensor, stored
from lptune.kernels.op import op
from lptune.numerics import TERNARY_PACKED, QuantizedTensor


def _empty_codes(w_NK: Tensor, transposed: bool) -> QuantizedTensor:
    return empty_tensor(w_NK, "int8", transposed)


@op(fake=_empty_codes)
def quantize_ternary(w_NK: Tensor, *, transposed: bool = False) -> QuantizedTensor:
    """`numerics.quantize_ternary(w_NK)`: codes in int8, one scale. w_NK: any float dtype."""
    q_NK, scale_11 = numerics.quantize_ternary(w_NK)
    return QuantizedTensor(stored(q_NK, transposed), scale_11)


def _empty_unpacked(packed_NB: Tensor, transposed: bool) -> Tensor:
    n, b = packed_NB.shape
    return empty_q(packed_NB.new_empty(n, b * TERNARY_PACKED), "int8", transposed)


@op(fake=_empty_unpacked)
def unpack_ternary(packed_NB: Tensor, *, transposed: bool = False) -> Tensor:
    """`numerics.unpack_ternary` along K: codes (N, 4 B) in int8. packed_NB: uint8, rows of any stride."""
    return stored(numerics.unpack_ternary(packed_NB, 1), transposed)
