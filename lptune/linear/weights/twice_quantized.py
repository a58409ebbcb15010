"""TwiceQuantized: a weight in 8 bits for `output`, and again for `grad_input`.

`mxfp8` and `grad_input=column` need two sets of 8-bit values of W, along K and along N. A gather in 8 bits
would send both, as many bytes as the compute dtype. But one rank, whose weights stay, has both made once in a
step, where layers would make each from the compute dtype in every micro-batch. They take the place of the
copy in a 16-bit compute dtype: two bytes for each parameter, and their scales.
"""

import torch
from torch import Tensor

from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.numerics import QuantizedBlocks, dequantize_blocks


class TwiceQuantized(GatheredWeight):
    """A weight whose `q_NK` and `scale` serve `output` only. No gather makes it."""

    PARTS = ("q_NK", "scale", "grad_q_NK", "grad_scale")
    CONTEXT = ("scale_block",)

    grad_q_NK: Tensor
    """8-bit values for grad_input, stored as its GEMM wants them."""
    grad_scale: Tensor
    scale_block: tuple[int, int]
    """(rows, columns) of the blocks of `scale`."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values by which `output` multiplies; see GatheredWeight."""
        quantized = QuantizedBlocks(self.q_NK, self.scale)
        return dequantize_blocks(quantized, self.scale_block, dtype or self.dtype)

    @staticmethod
    def of(w_NK: Tensor, spec: LinearSpec) -> "TwiceQuantized":
        """w_NK: in the compute dtype. spec: of a layer whose kind `quantizes_twice`."""
        kind = kind_of(spec)
        parts = [part for quantized in kind.quantize_twice(spec, w_NK) for part in quantized]
        n, k = w_NK.shape
        weight = TwiceQuantized(*parts, dtype=w_NK.dtype, scale_block=kind.weight_scale_block(n, k))
        assert isinstance(weight, TwiceQuantized)
        return weight
