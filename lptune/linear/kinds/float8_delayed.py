"""`float8_delayed`: like `float8_tensorwise`, but scales come from the amaxes of past steps.

The scale is computed from the largest amax of the last steps, not from the tensor's own amax, so quantizing
does not wait for a reduction (lptune/kernels/delayed.py). LowPrecision keeps the histories
(lptune/linear/steps/delayed.py). All ranks have the same history, so an 8-bit gather needs no other
collective.
"""

from torch import Tensor

from lptune.config import KindKeys
from lptune.kernels import quantize_delayed, quantize_delayed_both_ways
from lptune.linear.kind import LinearSpec
from lptune.linear.kinds.tensorwise import Tensorwise
from lptune.numerics import QuantizedTensor


class Float8Delayed(Tensorwise):
    """One scale per tensor, taken from the amaxes of past steps."""

    name = "float8_delayed"
    keys = KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("e5m2", "e4m3"),
        can_gather_low=True,
        needs_float8=True,
        min_sqnr_db=15.0,
    )
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


KIND = Float8Delayed()
