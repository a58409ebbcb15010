"""One scale per block: `float8_blockwise` (DeepSeek-V3, arXiv:2412.19437) and `mxfp8` (OCP MX).

                   float8_blockwise                         mxfp8
    output         x 1 x 128,   W 128 x 128                 x, W in blocks of 32 along K
    grad_input     g 1 x 128,   W 128 x 128 (the same)      g, W in blocks of 32 along N
    grad_weight    g 128 x 1,   x 128 x 1                   g, x in blocks of 32 along T

Scales change along the contraction, so the GEMM applies them block by block inside the sum (block_scaled_mm).
An outlier then coarsens its own block only. The square block of W serves `output` and `grad_input` with one
set of 8-bit values; MX blocks are vectors, so W is quantized once along K and once along N.
"""

import torch
from torch import Tensor

from lptune.kernels import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, block_scaled_mm, quantize_blocks, quantize_mx
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
    dtype, size, gx_TK, gw_NK = g_TN.dtype, _SIZES[spec.scaling], None, None
    if needs_grad_input and spec.grad_input == "high":
        gx_TK = g_TN @ _high_weight(spec, w_NK, dtype)
    elif needs_grad_input:
        g, w = _quantize(spec, g_TN, 1, spec.grad_fmt), _quantize_weight(spec, w_NK, 0)
        gx_TK = block_scaled_mm(
            g.q_MK, w.q_MK, g.scale, w.scale, size, dtype, layer, GRAD_INPUT, emulate=spec.emulate
        )
    if needs_grad_weight and spec.grad_weight == "high":
        gw_NK = g_TN.t() @ x_TK
    elif needs_grad_weight:
        g, x = _quantize(spec, g_TN, 0, spec.grad_fmt), _quantize(spec, x_TK, 0, spec.fmt)
        gw_NK = block_scaled_mm(
            g.q_MK.t(), x.q_MK, g.scale.t(), x.scale, size, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
        )
    return gx_TK, gw_NK


def _quantize(spec: LinearSpec, tensor: Tensor, dim: int, fmt: str) -> QuantizedBlocks:
    if spec.scaling == "mx":
        return QuantizedBlocks(*quantize_mx(tensor, dim, fmt))
    size = _SIZES[spec.scaling]
    return quantize_blocks(tensor, (1, size) if dim == 1 else (size, 1), fmt)


def _high_weight(spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """What a GEMM in compute dtype multiplies by."""
    if not spec.high_uses_8_bit_weight:
        return w_NK
    size = _SIZES[spec.scaling]
    block = (size if spec.scaling == "blockwise" else 1, size)
    return dequantize_blocks(_quantize_weight(spec, w_NK, 1), block, dtype)


def _quantize_weight(spec: LinearSpec, w_NK: Tensor, dim: int) -> QuantizedBlocks:
    if isinstance(w_NK, GatheredWeight):
        return QuantizedBlocks(w_NK.q_NK, w_NK.scale)
    if spec.scaling == "mx":
        return _quantize(spec, w_NK, dim, spec.fmt)
    size = _SIZES[spec.scaling]
    return quantize_blocks(w_NK, (size, size), spec.fmt)
