"""GEMM with a weight that is stored in 8 bits and multiplied in the compute dtype.

The whole weight is dequantized before a GEMM in bfloat16 or float32. This saves memory of weights between
GEMMs, and bytes of gathers, but no arithmetic; so it does not count in low_precision_flops_fraction.
"""

from torch import Tensor

from lptune.kernels.op import op
from lptune.kernels.record import note
from lptune.numerics import QuantizedRows, dequantize


def _empty_product(a_TM: Tensor, q_NK: Tensor, transposed: bool) -> Tensor:
    return a_TM.new_empty((a_TM.shape[0], q_NK.shape[0 if transposed else 1]))


@op(fake=_empty_product)
def weight_only_mm(
    a_TM: Tensor, q_NK: Tensor, scale_N1: Tensor, transposed: bool, layer: Tensor, gemm: int
) -> Tensor:
    """`a @ w.t()` if transposed, else `a @ w`, with `w = (q * scale).to(a.dtype)`; in a's dtype.

    a_TM: float, (T, K) if transposed, else (T, N). q_NK: int8, rows of any stride. scale_N1: float32. layer:
    `layer_handle` of the calling layer; gemm: index into GEMMS. Both are used by `record_gemms` only.
    """
    w_NK = dequantize(QuantizedRows(q_NK, scale_N1), a_TM.dtype)
    out = a_TM @ (w_NK.t() if transposed else w_NK)
    note(layer, gemm)
    return out
