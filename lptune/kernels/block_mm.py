"""GEMM on float8 operands whose scales change along the contraction.

`out[m, n] = sum over blocks k of scale_a[m, k] * scale_b[k, n] * (a_block @ b_block)`: each block's product
is scaled before it enters the sum. DeepSeek-V3 (arXiv:2412.19437) uses blocks of 128 with float32 scales, MX
blocks of 32 with E8M0 scales.
"""

import torch
from torch import Tensor

from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.op import op
from lptune.kernels.record import GRAD_WEIGHT, note
from lptune.numerics import MX_BLOCK, expand_blocks

_TRITON_BLOCKS = (MX_BLOCK, 128)  # block sizes of the Triton GEMM


def _empty_product(
    a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor, block: int, out_dtype: torch.dtype
) -> Tensor:
    _check(a_MK, b_KN, scale_a, scale_b, block)
    return a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=out_dtype)


@op(fake=_empty_product)
def block_scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block: int,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
    *,
    emulate: bool = False,
) -> Tensor:
    """Same as dequantizing both operands to float64, multiplying and rounding, up to float32 rounding.

    a_MK, b_KN: float8. scale_a: (M, ceil(K / block)). scale_b: (ceil(K / block), N), or
    (ceil(K / block), ceil(N / block)) for square blocks. Scales: float32 or float8_e8m0fnu. layer, gemm,
    emulate: as for `scaled_mm`. Raises ValueError for other shapes.
    """
    _check(a_MK, b_KN, scale_a, scale_b, block)
    backend = "reference" if emulate else choose_backend("block_gemm", a_MK.device.type)
    if backend == "triton" and block in _TRITON_BLOCKS:
        out_MN: Tensor = triton_kernels().block_scaled_mm(
            a_MK, b_KN, scale_a, scale_b, block, out_dtype, tokens_contracted=gemm == GRAD_WEIGHT
        )
    else:
        (m, k), n = a_MK.shape, b_KN.shape[1]
        b_columns = 1 if scale_b.shape[1] == n else block
        # Dequantizes the operands instead of scaling partial sums: equal up to rounding.
        a32 = a_MK.to(torch.float32) * expand_blocks(scale_a, (1, block), (m, k))
        b32 = b_KN.to(torch.float32) * expand_blocks(scale_b, (block, b_columns), (k, n))
        out_MN = (a32 @ b32).to(out_dtype)
    note(layer, gemm)
    return out_MN


def _check(a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor, block: int) -> None:
    (m, k), n = a_MK.shape, b_KN.shape[1]
    num_blocks = -(-k // block)
    if b_KN.shape[0] != k:
        raise ValueError(
            f"block_scaled_mm needs (M, K) and (K, N), got {tuple(a_MK.shape)} and {tuple(b_KN.shape)}"
        )
    if scale_a.shape != (m, num_blocks):
        raise ValueError(
            f"block_scaled_mm needs scale_a of shape {(m, num_blocks)}, got {tuple(scale_a.shape)}"
        )
    if scale_b.shape not in ((num_blocks, n), (num_blocks, -(-n // block))):
        raise ValueError(
            f"block_scaled_mm needs scale_b of shape {(num_blocks, n)} or {(num_blocks, -(-n // block))}, "
            f"got {tuple(scale_b.shape)}"
        )
