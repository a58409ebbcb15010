"""NVFP4 (lptune/numerics/nvfp4.py) as custom ops: the quantizer, and the GEMM.

The quantizer is plain torch on every device: it passes over x about a dozen times, and no kernel does it in
one yet. The GEMM is torch's (cuBLASLt) on Blackwell, which multiplies 4-bit numbers and applies the scales of
blocks in its tensor cores. Elsewhere it is emulated: q * s, exact in float32, is multiplied in float32, and
the scales of the tensors are applied to the sum.
"""

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import cublaslt
from lptune.kernels.backend import choose_backend
from lptune.kernels.op import op
from lptune.kernels.record import note
from lptune.kernels.stochastic import random_bits
from lptune.numerics import NVFP4_BLOCK, QuantizedNvfp4, scaled_by_block


def _empty(x_MK: Tensor, dim: int) -> QuantizedNvfp4:
    m, k = x_MK.shape if dim == 1 else x_MK.shape[::-1]
    num_blocks = -(-k // NVFP4_BLOCK)
    q = x_MK.new_empty((m, num_blocks * NVFP4_BLOCK), dtype=torch.float8_e4m3fn)
    scale = x_MK.new_empty((m, num_blocks), dtype=torch.float8_e4m3fn)
    return QuantizedNvfp4(q, scale, x_MK.new_empty((1, 1), dtype=torch.float32))


@op(fake=_empty)
def quantize_nvfp4(
    x_MK: Tensor, dim: int, *, square: bool = False, rotated: bool = False, layer: Tensor | None = None
) -> QuantizedNvfp4:
    """`numerics.quantize_nvfp4` of x_MK for a GEMM that contracts over `dim`; of its transpose, if that is 0.

    rotated: along `dim`, by `numerics.rotate_nvfp4`, first. layer: a handle whose key was set, to round
    stochastically; None: to nearest. square: as there.
    """
    x = (x_MK if dim == 1 else x_MK.t()).contiguous()
    x = numerics.rotate_nvfp4(x) if rotated else x
    random = None
    if layer is not None:
        random = random_bits(layer, dim, _empty(x, 1).q_MK)
    return numerics.quantize_nvfp4(x, square=square, random_MK=random)


def _empty_product(
    a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    _check(a_MK, b_KN, scale_a, scale_b)
    return a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=out_dtype)


@op(fake=_empty_product)
def nvfp4_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    tensor_scale_a_11: Tensor,
    tensor_scale_b_11: Tensor,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
    *,
    emulate: bool = False,
) -> Tensor:
    """Same as dequantizing both operands to float64, multiplying and rounding, up to float32 rounding.

    a_MK, scale_a (M, K / 16), tensor_scale_a_11: a QuantizedNvfp4. b_KN, scale_b (K / 16, N): another,
    transposed. layer, gemm, emulate: as for `scaled_mm`. Raises ValueError for other shapes.
    """
    _check(a_MK, b_KN, scale_a, scale_b)
    backend = "reference" if emulate else choose_backend("fp4_gemm", a_MK.device.type)
    if backend == "torch":
        whole = (tensor_scale_a_11, tensor_scale_b_11)
        out_MN = cublaslt.nvfp4_mm(a_MK, b_KN.t(), scale_a, scale_b.t(), *whole, out_dtype)
    else:
        sums_MN = scaled_by_block(a_MK, scale_a) @ scaled_by_block(b_KN.t(), scale_b.t()).t()
        # One after the other: the product of two scales of small tensors may be 0 in float32.
        out_MN = (sums_MN * tensor_scale_a_11 * tensor_scale_b_11).to(out_dtype)
    note(layer, gemm)
    return out_MN


def _check(a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    (m, k), n = a_MK.shape, b_KN.shape[1]
    needed = ((k, n), (m, k // NVFP4_BLOCK), (k // NVFP4_BLOCK, n))
    found = (b_KN.shape, scale_a.shape, scale_b.shape)
    if k % NVFP4_BLOCK or needed != found:
        raise ValueError(
            f"nvfp4_mm needs b, scale_a and scale_b of {needed} for an a of {(m, k)}, K a multiple of 16; "
            f"got {tuple(map(tuple, found))}"
        )
