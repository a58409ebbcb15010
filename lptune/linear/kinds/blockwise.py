"""The code that kinds with one scale per block share: `float8_blockwise` and `mxfp8`.

Scales change along the contraction, so the GEMM multiplies each block's part of the sum by the block's scales
(block_scaled_mm). An outlier then coarsens its own block only. g is quantized twice, in blocks along N for
grad_input and in blocks along T for grad_weight; one op reads g once and makes both. x is saved in compute
dtype, because `output` needs blocks along K and grad_weight needs blocks along T. The file of each kind says
how it forms the blocks of x and g, and those of W.

Shapes: T tokens, K in_features, N out_features. The M and K of QuantizedBlocks.q_MK are those of any matrix.
"""

from abc import abstractmethod
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
    transposed_copy,
)
from lptune.linear.kind import Kind, LinearSpec
from lptune.linear.noise import Operand, Operands, rounded
from lptune.linear.shared_input import Once
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.linear.weights.twice_quantized import TwiceQuantized
from lptune.numerics import QuantizedBlocks, dequantize_blocks


class Blockwise(Kind):
    """x, W and g have scales for blocks of `size` along the contraction."""

    size: ClassVar[int]
    """Number of elements along the contraction that share a scale."""

    @abstractmethod
    def quantize(self, tensor: Tensor, dim: int, fmt: str, *, transposed: bool = False) -> QuantizedBlocks:
        """Quantizes x or g in blocks of `size` elements along `dim`. transposed: q is stored by columns."""

    @abstractmethod
    def quantize_weight(
        self, w_NK: Tensor, dim: int, fmt: str, *, transposed: bool = False
    ) -> QuantizedBlocks:
        """Quantizes W for a GEMM that contracts over W's `dim`. transposed: as in `quantize`."""

    @abstractmethod
    def quantize_gradient(
        self, g_TN: Tensor, fmt: str, *, transposed: bool
    ) -> tuple[QuantizedBlocks, QuantizedBlocks]:
        """Quantizes g in blocks along N, and along T. transposed: the second q is stored by columns."""

    def forward(
        self,
        spec: LinearSpec,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None,
        once: Once,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert quantized_x is None, "blocks of x are wanted along K and along T: no one gather brings both"
        if spec.output == "high":
            return x_TK @ self._high_weight(spec, w_NK, x_TK.dtype).t(), (x_TK,)
        x, w = once(lambda: self.quantize(x_TK, 1, spec.fmt)), self._weight(spec, w_NK, 1)
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
        self,
        spec: LinearSpec,
        g_TN: Tensor,
        w_NK: Tensor,
        saved: tuple[Tensor, ...],
        layer: Tensor,
        needs_grad_input: bool,
        needs_grad_weight: bool,
        once: Once,
    ) -> tuple[Tensor | None, Tensor | None]:
        # `transposed` is for operands that are contracted over their rows. If the device wants operands
        # contiguous along the contraction, their q is stored by columns.
        dtype, size, transposed = g_TN.dtype, self.size, k_major(g_TN.device)
        low_input = needs_grad_input and spec.grad_input != "high"
        low_weight = needs_grad_weight and spec.grad_weight != "high"
        g_rows, g_columns = self._gradient(spec, g_TN, low_input, low_weight, transposed)
        gx_TK, gw_NK = None, None
        # A GEMM that is needed, but has no quantized g, is `high`.
        if needs_grad_input and g_rows is None:
            gx_TK = g_TN @ self._high_weight(spec, w_NK, dtype)
        elif g_rows is not None:
            g, w = g_rows, self._weight(spec, w_NK, 0, transposed)
            gx_TK = block_scaled_mm(
                g.q_MK, w.q_MK, g.scale, w.scale, size, dtype, layer, GRAD_INPUT, emulate=spec.emulate
            )
        if needs_grad_weight and g_columns is None:
            gw_NK = g_TN.t() @ saved[0]
        elif g_columns is not None:
            g, x = g_columns, once(lambda: self.quantize(saved[0], 0, spec.fmt, transposed=transposed))
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
            return self.quantize_gradient(g_TN, spec.grad_fmt, transposed=transposed)
        rows = self.quantize(g_TN, 1, spec.grad_fmt) if for_input else None
        return rows, self.quantize(g_TN, 0, spec.grad_fmt, transposed=transposed) if for_weight else None

    def _high_weight(self, spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of a GEMM that is `high`, in `dtype`. If `output` uses the 8-bit weight or FSDP gathers
        it, these are its dequantized values, so that forward and backward use the same weight.
        """
        if not spec.high_uses_8_bit_weight:
            return w_NK  # has `dtype`: see Kind.forward
        block = self.weight_scale_block(w_NK.shape[0], w_NK.shape[1])
        return dequantize_blocks(self._weight(spec, w_NK, 1), block, dtype)

    def _weight(self, spec: LinearSpec, w_NK: Tensor, dim: int, transposed: bool = False) -> QuantizedBlocks:
        """W in 8 bits, for a GEMM that contracts over W's `dim`."""
        if isinstance(w_NK, TwiceQuantized) and dim == 0:
            return QuantizedBlocks(w_NK.grad_q_NK, w_NK.grad_scale)  # stored as `transposed` wants it
        if isinstance(w_NK, GatheredWeight):
            # Of a gathered weight for any `dim`: only a kind with square blocks gathers W in 8 bits.
            return QuantizedBlocks(transposed_copy(w_NK.q_NK) if transposed else w_NK.q_NK, w_NK.scale)
        return self.quantize_weight(w_NK, dim, spec.fmt, transposed=transposed)

    def quantizes_twice(self, spec: LinearSpec) -> bool:
        """See Kind. Square blocks serve both GEMMs."""
        return self.weight_block is None and spec.output == "low" and spec.grad_input == "block"

    def quantize_twice(self, spec: LinearSpec, w_NK: Tensor) -> tuple[Quantized, Quantized]:
        along_k = self.quantize_weight(w_NK, 1, spec.fmt)
        along_n = self.quantize_weight(w_NK, 0, spec.fmt, transposed=k_major(w_NK.device))
        return Quantized(*along_k), Quantized(*along_n)

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.formats(gemm)} block{self.size}"

    def describe_gather(self, spec: LinearSpec) -> str:
        return f"{spec.fmt} block{self.size}"

    # --- Predicted noise, see Kind: the operands of each low GEMM, with the errors of their rounding.

    def noisy_output(self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor) -> Operands:
        block = self.weight_scale_block(w_NK.shape[0], w_NK.shape[1])
        return self.noisy(spec, x_TK, 1, spec.fmt), self._noisy_weight(spec, w_NK, block).t()

    def noisy_grad_input(self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor) -> Operands:
        n, k = w_NK.shape
        # Square blocks serve `output` and `grad_input`. Other kinds quantize W again, along N.
        block = (self.size, 1) if self.weight_block is None else self.weight_scale_block(n, k)
        return self.noisy(spec, g_TN, 1, spec.grad_fmt), self._noisy_weight(spec, w_NK, block)

    def noisy_grad_weight(self, spec: LinearSpec, g_TN: Tensor, x_TK: Tensor) -> Operands:
        return self.noisy(spec, g_TN, 0, spec.grad_fmt).t(), self.noisy(spec, x_TK, 0, spec.fmt)

    def noisy(self, spec: LinearSpec, tensor: Tensor, dim: int, fmt: str) -> Operand:
        """x or g in float64, with the errors of quantizing it in blocks along `dim`."""
        block = (1, self.size) if dim == 1 else (self.size, 1)
        return rounded(tensor, block, fmt, power_of_two=spec.power_of_two)

    def _noisy_weight(self, spec: LinearSpec, w_NK: Tensor, block: tuple[int, int]) -> Operand:
        return rounded(w_NK, block, spec.fmt, power_of_two=spec.power_of_two)
