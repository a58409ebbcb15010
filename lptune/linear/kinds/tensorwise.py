"""The kinds with one scale per tensor: `int8_tensorwise`, `float8_tensorwise`, `float8_delayed`.

A single scale can be taken out of every sum. So x, W and g are each quantized once, and the same 8-bit tensor
serves both GEMMs that use it. These kinds cost least and are the coarsest: one outlier token sets the scale
of all tokens. Float8 suffers less from this than INT8, because its rounding step shrinks with the value.

In float8, g is e5m2 by default: gradients spread over more orders of magnitude than e4m3 covers
(arXiv:2209.05433).

Some devices need both operands of a GEMM contiguous along the contraction. For backward, W and x are then
column-major, and g is needed in both orders; one pass over g makes both.
"""

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Quantized,
    k_major,
    quantize_by_amax,
    quantize_delayed,
    quantize_delayed_both_ways,
    quantize_tensor,
    quantize_tensor_both_ways,
    quantize_tensor_stochastic,
    quantize_tensor_stochastic_both_ways,
    scaled_mm,
    transposed_copy,
)
from lptune.linear.kind import Agree, Kind, LinearSpec, Needs, Saved, Shard
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.linear.weights.weight_amax import quantize_by_agreement
from lptune.numerics import QuantizedTensor, dequantize


class Tensorwise(Kind):
    """x, W and g have one scale each. Ranks that have parts of one of them agree on its amax first."""

    one_scale = True

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """See Kind. quantized_x: allowed only if `output` and `grad_weight` are low."""
        if spec.output == "high":
            return x_TK @ self._high_weight(spec, w_NK, layer, x_TK.dtype).t(), (x_TK,)
        x = QuantizedTensor(*quantized_x) if quantized_x else self._quantize(spec, x_TK, layer, "x")
        w = self._quantize(spec, w_NK, layer, "w")
        out_TN = scaled_mm(
            x.q_MK, w.q_MK.t(), x.scale_11, w.scale_11, x_TK.dtype, layer, OUTPUT, emulate=spec.emulate
        )
        # Save x, not its 8-bit copy: q, k and v share one x, and would keep a copy each; a gathered one is
        # shared.
        return out_TN, quantized_x or (x_TK,)

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        dtype, transposed, gx_TK, gw_NK = g_TN.dtype, k_major(g_TN.device), None, None
        low_input = needs.input and spec.grad_input != "high"
        low_weight = needs.weight and spec.grad_weight != "high"
        g, g_transposed = self._gradient(spec, g_TN, layer, low_input, low_weight, transposed)
        if needs.input:
            if g is None:
                gx_TK = g_TN @ self._high_weight(spec, w_NK, layer, dtype)
            else:
                w = self._quantize(spec, w_NK, layer, "w", transposed)
                gx_TK = scaled_mm(
                    g.q_MK, w.q_MK, g.scale_11, w.scale_11, dtype, layer, GRAD_INPUT, emulate=spec.emulate
                )
        if needs.weight:
            if g_transposed is None:
                gw_NK = g_TN.t() @ saved[0]
            else:
                x = self._saved(spec, saved, layer, transposed)
                g_NT, scale_11 = g_transposed.q_MK.t(), g_transposed.scale_11
                gw_NK = scaled_mm(
                    g_NT, x.q_MK, scale_11, x.scale_11, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
                )
        return gx_TK, gw_NK

    def _gradient(
        self,
        spec: LinearSpec,
        g_TN: Tensor,
        layer: Tensor,
        for_input: bool,
        for_weight: bool,
        transposed: bool,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """(g for grad_input, row-major; g for grad_weight, column-major if `transposed`) or None for each."""
        if transposed and for_input and for_weight:
            by_rows, q_by_columns = self.quantize_gradient_both_ways(spec, g_TN, layer)
            return by_rows, by_rows._replace(q_MK=q_by_columns)
        if not (for_input or for_weight):
            return None, None
        g = self._quantize(spec, g_TN, layer, "g", transposed and for_weight)
        return g if for_input else None, g if for_weight else None

    def _saved(self, spec: LinearSpec, saved: Saved, layer: Tensor, transposed: bool) -> QuantizedTensor:
        """x in 8 bits for grad_weight, from the tensors that `forward` saved."""
        if len(saved) == 1:
            return self._quantize(spec, saved[0], layer, "x", transposed)
        q_TK, scale_11 = saved
        return QuantizedTensor(transposed_copy(q_TK) if transposed else q_TK, scale_11)

    def _high_weight(self, spec: LinearSpec, w_NK: Tensor, layer: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of a GEMM that is `high`, in `dtype`."""
        return (
            dequantize(self._quantize(spec, w_NK, layer, "w"), dtype) if spec.high_uses_8_bit_weight else w_NK
        )

    def _quantize(
        self, spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str, transposed: bool = False
    ) -> QuantizedTensor:
        if isinstance(tensor, GatheredWeight):
            return QuantizedTensor(transposed_copy(tensor.q_NK) if transposed else tensor.q_NK, tensor.scale)
        return self.quantize(spec, tensor, layer, operand, transposed)

    def quantize(
        self, spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str, transposed: bool
    ) -> QuantizedTensor:
        """Quantizes with one scale. operand: "x", "w" or "g". transposed: q is column-major."""
        fmt = spec.grad_fmt if operand == "g" else spec.fmt
        if spec.stochastic and operand == "g":
            return quantize_tensor_stochastic(
                tensor, fmt, layer, power_of_two=spec.power_of_two, transposed=transposed
            )
        return quantize_tensor(tensor, fmt, power_of_two=spec.power_of_two, transposed=transposed)

    def quantize_gradient_both_ways(
        self, spec: LinearSpec, g_TN: Tensor, layer: Tensor
    ) -> tuple[QuantizedTensor, Tensor]:
        """g stored row by row, and its q again, stored column by column."""
        if spec.stochastic:
            return quantize_tensor_stochastic_both_ways(
                g_TN, spec.grad_fmt, layer, power_of_two=spec.power_of_two
            )
        return quantize_tensor_both_ways(g_TN, spec.grad_fmt, power_of_two=spec.power_of_two)

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.formats(gemm)} tensor"

    def describe_gather(self, spec: LinearSpec) -> str:
        return f"{spec.fmt} tensor"

    def describe_tokens(self, spec: LinearSpec) -> str:
        return f"{spec.fmt} tensor"

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        return quantize_by_agreement(shard, spec.fmt, agree)

    def quantize_tokens(self, spec: LinearSpec, x_tK: Tensor, agree: Agree) -> Quantized:
        amax_11 = agree(x_tK.abs().amax().float().view(1, 1))
        return Quantized(*quantize_by_amax(x_tK, amax_11, spec.fmt, power_of_two=spec.power_of_two))


class Int8Tensorwise(Tensorwise):
    """`int8_tensorwise`: INT8 with one scale per tensor.

    Of the INT8 kinds it costs least to quantize. Of all kinds it is the coarsest: the rounding step is
    equally large for the smallest and the largest value of a tensor.
    """

    name = "int8_tensorwise"
    served_as = "int8"
    fmt = "int8"
    operations = ("int8_gemm",)


class Float8Tensorwise(Tensorwise):
    """`float8_tensorwise`: e4m3, gradients in e5m2, with one scale per tensor."""

    name = "float8_tensorwise"
    served_as = "float8"
    fmt = "e4m3"
    operations = ("float8_gemm",)


class Float8Delayed(Tensorwise):
    """`float8_delayed`: like `float8_tensorwise`, but scales come from the amaxes of past steps.

    The scale is computed from the largest amax of the last steps, not from the tensor's own amax, so
    quantizing does not wait for a reduction (lptune/kernels/delayed.py). LowPrecision keeps the histories
    (lptune/linear/steps/delayed.py). All ranks have the same history, so an 8-bit gather needs no other
    collective.
    """

    name = "float8_delayed"
    fmt = "e4m3"
    operations = ("float8_gemm",)
    has_history = True

    def quantize(
        self, spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str, transposed: bool
    ) -> QuantizedTensor:
        """Quantizes x, w or g by the scale that the layer's history gives for this operand."""
        fmt = spec.grad_fmt if operand == "g" else spec.fmt
        return quantize_delayed(tensor, fmt, layer, operand, transposed=transposed)

    def quantize_gradient_both_ways(
        self, spec: LinearSpec, g_TN: Tensor, layer: Tensor
    ) -> tuple[QuantizedTensor, Tensor]:
        return quantize_delayed_both_ways(g_TN, spec.grad_fmt, layer, "g")
