"""The kinds with one scale per block: `float8_blockwise` and `mxfp8`.

Scales change along the contraction, so the GEMM multiplies each block's part of the sum by the block's scales
(block_scaled_mm). An outlier then coarsens its own block only. g is quantized twice, in blocks along N for
grad_input and in blocks along T for grad_weight; one op reads g once and makes both. x is saved in compute
dtype, because `output` needs blocks along K and grad_weight needs blocks along T. The kinds differ in the
size of a block, in whether those of W are square, and in how scales are stored.

Shapes: T tokens, K in_features, N out_features. The M and K of QuantizedBlocks.q_MK are those of any matrix.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Quantized,
    block_scaled_mm,
    k_major,
    quantize_blocks,
    quantize_row_and_column_blocks,
    transposed_copy,
)
from lptune.linear.kind import Agree, Kind, LinearSpec, Needs, Saved, Shard
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.linear.weights.weight_amax import quantize_by_agreement
from lptune.numerics import MX_BLOCK, QuantizedBlocks, dequantize_blocks


class Blockwise(Kind):
    """x and g have scales for blocks of `size` along the contraction; W too, or for squares of that side."""

    size: ClassVar[int]
    """Number of elements along the contraction that share a scale."""

    def quantize(self, tensor: Tensor, dim: int, fmt: str, *, transposed: bool = False) -> QuantizedBlocks:
        """Quantizes in blocks of `size` elements along `dim`. transposed: q is stored by columns."""
        block = (1, self.size) if dim == 1 else (self.size, 1)
        return quantize_blocks(tensor, block, fmt, e8m0=self.power_of_two, transposed=transposed)

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        assert quantized_x is None, "blocks of x are wanted along K and along T: no one gather brings both"
        if spec.output == "high":
            return x_TK @ self._high_weight(spec, w_NK, x_TK.dtype).t(), (x_TK,)
        x, w = self.quantize(x_TK, 1, spec.fmt), self._weight(spec, w_NK, 1)
        out_TN = block_scaled_mm(
            x.q_MK,
            w.q_MK.t(),
            x.scale,
            w.scale.t(),
            self.size,
            x_TK.dtype,
            layer,
            OUTPUT,
            emulate=spec.emulate,
        )
        return out_TN, (x_TK,)

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        # `transposed` is for operands that are contracted over their rows. If the device wants operands
        # contiguous along the contraction, their q is stored by columns.
        dtype, size, transposed = g_TN.dtype, self.size, k_major(g_TN.device)
        low_input = needs.input and spec.grad_input != "high"
        low_weight = needs.weight and spec.grad_weight != "high"
        g_rows, g_columns = self._gradient(spec, g_TN, low_input, low_weight, transposed)
        gx_TK, gw_NK = None, None
        # A GEMM that is needed, but has no quantized g, is `high`.
        if needs.input and g_rows is None:
            gx_TK = g_TN @ self._high_weight(spec, w_NK, dtype)
        elif g_rows is not None:
            g, w = g_rows, self._weight(spec, w_NK, 0, transposed)
            gx_TK = block_scaled_mm(
                g.q_MK, w.q_MK, g.scale, w.scale, size, dtype, layer, GRAD_INPUT, emulate=spec.emulate
            )
        if needs.weight and g_columns is None:
            gw_NK = g_TN.t() @ saved[0]
        elif g_columns is not None:
            g, x = g_columns, self.quantize(saved[0], 0, spec.fmt, transposed=transposed)
            gw_NK = block_scaled_mm(
                g.q_MK.t(),
                x.q_MK,
                g.scale.t(),
                x.scale,
                size,
                dtype,
                layer,
                GRAD_WEIGHT,
                emulate=spec.emulate,
            )
        return gx_TK, gw_NK

    def _gradient(
        self, spec: LinearSpec, g_TN: Tensor, for_input: bool, for_weight: bool, transposed: bool
    ) -> tuple[QuantizedBlocks | None, QuantizedBlocks | None]:
        """(g in blocks along N, for grad_input; g in blocks along T, for grad_weight); None if not wanted."""
        if for_input and for_weight:
            return quantize_row_and_column_blocks(
                g_TN, self.size, spec.grad_fmt, e8m0=self.power_of_two, transposed=transposed
            )
        rows = self.quantize(g_TN, 1, spec.grad_fmt) if for_input else None
        return rows, self.quantize(g_TN, 0, spec.grad_fmt, transposed=transposed) if for_weight else None

    def _high_weight(self, spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of a GEMM that is `high`, in `dtype`. If `output` uses the 8-bit weight or FSDP gathers
        it, these are its dequantized values, so that forward and backward use the same weight.
        """
        if not spec.high_uses_8_bit_weight:
            return w_NK  # has `dtype`: see Kind.forward
        return dequantize_blocks(self._weight(spec, w_NK, 1), (self.weight_block or 1, self.size), dtype)

    def _weight(self, spec: LinearSpec, w_NK: Tensor, dim: int, transposed: bool = False) -> QuantizedBlocks:
        """W in 8 bits, for a GEMM that contracts over W's `dim`."""
        if isinstance(w_NK, GatheredWeight):
            # Of a gathered weight for any `dim`: only a kind with square blocks gathers W in 8 bits.
            return QuantizedBlocks(transposed_copy(w_NK.q_NK) if transposed else w_NK.q_NK, w_NK.scale)
        if (side := self.weight_block) is not None:
            return quantize_blocks(w_NK, (side, side), spec.fmt, transposed=transposed)
        return self.quantize(w_NK, dim, spec.fmt, transposed=transposed)

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.formats(gemm)} block{self.size}"

    def describe_gather(self, spec: LinearSpec) -> str:
        return f"{spec.fmt} block{self.size}"


class Float8Blockwise(Blockwise):
    """`float8_blockwise` (DeepSeek-V3, arXiv:2412.19437): blocks of 128 elements, of 128 x 128 in W.

        output         x 1 x 128,   W 128 x 128
        grad_input     g 1 x 128,   W 128 x 128 (the same)
        grad_weight    g 128 x 1,   x 128 x 1

    Square blocks let `output` and `grad_input` use the same 8-bit values of W. A shard of W can end inside a
    block, so ranks agree on the amaxes of blocks before they quantize their rows for a gather.
    """

    name = "float8_blockwise"
    served_as = "float8_block"
    fmt = "e4m3"
    operations = ("block_gemm",)
    size = 128
    weight_block = 128

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        return quantize_by_agreement(shard, spec.fmt, agree)


class Mxfp8(Blockwise):
    """`mxfp8` (OCP MX): blocks of 32 elements, each with a power of two, stored in 8 bits, as scale.

        output         x, W in blocks of 32 along K
        grad_input     g, W in blocks of 32 along N
        grad_weight    g, x in blocks of 32 along T

    Blocks are vectors, so W is quantized along K for `output` and again along N for `grad_input`. No single
    set of 8-bit values serves both, so this kind has no 8-bit gather. Only Blackwell GPUs have GEMMs for such
    blocks. On other devices the GEMMs are emulated, so that the kind can be tried without such a GPU; the
    plan says so.
    """

    name = "mxfp8"
    fmt = "e4m3"
    power_of_two = True
    operations = ("block_gemm",)
    emulated_where_missing = True
    size = MX_BLOCK
