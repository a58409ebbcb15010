"""GEMMs in the compute dtype with a weight of fewer bits: stored in 8 bits, or rounded to 4.

The whole weight is dequantized before a GEMM in bfloat16 or float32. This saves no arithmetic, so it does not
count in low_precision_flops_fraction. A weight that is stored in 8 bits saves memory between GEMMs, and bytes
of gathers; one that is rounded to 4 bits for the GEMM alone saves nothing: it is training for INT4 servers.
"""

from torch import Tensor

from lptune.kernels.op import op
from lptune.kernels.record import note
from lptune.numerics import QuantizedRows, dequantize, dequantize_groups, quantize_groups


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


def _empty_of_matrix(a_TM: Tensor, w_NK: Tensor, transposed: bool) -> Tensor:
    return _empty_product(a_TM, w_NK, transposed)


@op(fake=_empty_of_matrix)
def int4_weight_mm(a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
    """As `weight_only_mm`, with w_NK, float, rounded to 4 bits by groups of its rows (numerics/groups.py)."""
    rounded_NK = dequantize_groups(quantize_groups(w_NK), a_TM.dtype)
    out = a_TM @ (rounded_NK.t() if transposed else rounded_NK)
    note(layer, gemm)
    return out
