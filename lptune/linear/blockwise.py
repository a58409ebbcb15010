"""One scale per block: `float8_blockwise` (DeepSeek-V3, arXiv:2412.19437) and `mxfp8` (OCP MX).

                   float8_blockwise                         mxfp8
    output         x 1 x 128,   W 128 x 128                 x, W in blocks of 32 along K
    grad_input     g 1 x 128,   W 128 x 128 (the same)      g, W in blocks of 32 along N
    grad_weight    g 128 x 1,   x 128 x 1                   g, x in blocks of 32 along T

Scales change along the contraction, so the GEMM applies them block by block inside the sum (block_scaled_mm).
An outlier then coarsens its own block only. The square block of W serves `output` and `grad_input` with one
set of 8-bit values; MX blocks are vectors, so W is quantized once along K and once along N. g is wanted along
N and along T, and is read once for both.
"""

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    block_scaled_mm,
    k_major,
    quantize_blocks,
    quantize_mx,
    quantize_mx_rows_and_columns,
    quantize_row_and_column_blocks,
    transposed_copy,
)
from lptune.linear.master_weight import GatheredWeight
from lptune.linear.spec import LinearSpec
from lptune.numerics import MX_BLOCK, QuantizedBlocks, dequantize_blocks

_SIZES = {"blockwise": 128, "mx": MX_BLOCK}


def forward(spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(`x @ w.T` in x's dtype, what `backward` needs of x). w_NK has x's dtype."""
    if spec.output == "high":
        return x_TK @ _high_weight(spec, w_NK, x_TK.dtype).t(), (x_TK,)
    x, w = _quantize(spec, x_TK, 1, spec.fmt), _quantize_weight(spec, w_NK, 1)
    size = _SIZES[spec.scaling]
    out_TN = block_scaled_mm(
        x.q_MK,
        w.q_MK.t(),
        x.scale,
        w.scale.t(),
        size,
        x_TK.dtype,
        layer,
        OUTPUT,
        emulate=spec.emulate,
    )
    return out_TN, (x_TK,)


def backward(
    spec: LinearSpec,
    g_TN: Tensor,
    w_NK: Tensor,
    saved: tuple[Tensor, ...],
    layer: Tensor,
    needs_grad_input: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input, grad_weight) in g's dtype; None where not needed. g_TN, w_NK: same dtype."""
    (x_TK,) = saved
    dtype, size, transposed = g_TN.dtype, _SIZES[spec.scaling], k_major(g_TN.device)
    low_input = needs_grad_input and spec.grad_input != "high"
    low_weight = needs_grad_weight and spec.grad_weight != "high"
    g_rows, g_columns = _gradient(spec, g_TN, low_input, low_weight, transposed)
    gx_TK, gw_NK = None, None
    if needs_grad_input and g_rows is None:
        gx_TK = g_TN @ _high_weight(spec, w_NK, dtype)
    elif g_rows is not None:
        g, w = g_rows, _quantize_weight(spec, w_NK, 0, transposed)
        gx_TK = block_scaled_mm(
            g.q_MK, w.q_MK, g.scale, w.scale, size, dtype, layer, GRAD_INPUT, emulate=spec.emulate
        )
    if needs_grad_weight and g_columns is None:
        gw_NK = g_TN.t() @ x_TK
    elif g_columns is not None:
        g, x = g_columns, _quantize(spec, x_TK, 0, spec.fmt, transposed)
        gw_NK = block_scaled_mm(
            g.q_MK.t(), x.q_MK, g.scale.t(), x.scale, size, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
        )
    return gx_TK, gw_NK


def _gradient(
    spec: LinearSpec, g_TN: Tensor, for_input: bool, for_weight: bool, transposed: bool
) -> tuple[QuantizedBlocks | None, QuantizedBlocks | None]:
    """g in blocks along N, for grad_input, and along T, for grad_weight; None where it is not wanted."""
    if not (for_input and for_weight):
        rows = _quantize(spec, g_TN, 1, spec.grad_fmt) if for_input else None
        return rows, _quantize(spec, g_TN, 0, spec.grad_fmt, transposed) if for_weight else None
    if spec.scaling == "mx":
        both = quantize_mx_rows_and_columns(g_TN, spec.grad_fmt, transposed=transposed)
        return QuantizedBlocks(*both[0]), QuantizedBlocks(*both[1])
    return quantize_row_and_column_blocks(g_TN, _SIZES[spec.scaling], spec.grad_fmt, transposed=transposed)


def _quantize(
    spec: LinearSpec, tensor: Tensor, dim: int, fmt: str, transposed: bool = False
) -> QuantizedBlocks:
    if spec.scaling == "mx":
        return QuantizedBlocks(*quantize_mx(tensor, dim, fmt, transposed=transposed))
    size = _SIZES[spec.scaling]
    block = (1, size) if dim == 1 else (size, 1)
    return quantize_blocks(tensor, block, fmt, transposed=transposed)


def _high_weight(spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """What a GEMM in compute dtype multiplies by."""
    if not spec.high_uses_8_bit_weight:
        return w_NK
    size = _SIZES[spec.scaling]
    block = (size if spec.scaling == "blockwise" else 1, size)
    return dequantize_blocks(_quantize_weight(spec, w_NK, 1), block, dtype)


def _quantize_weight(spec: LinearSpec, w_NK: Tensor, dim: int, transposed: bool = False) -> QuantizedBlocks:
    if isinstance(w_NK, GatheredWeight):
        return QuantizedBlocks(transposed_copy(w_NK.q_NK) if transposed else w_NK.q_NK, w_NK.scale)
    if spec.scaling == "mx":
        return _quantize(spec, w_NK, dim, spec.fmt, transposed)
    size = _SIZES[spec.scaling]
    return quantize_blocks(w_NK, (size, size), spec.fmt, transposed=transposed)
