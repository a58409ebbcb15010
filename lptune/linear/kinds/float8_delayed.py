"""`float8_delayed`: as `float8_tensorwise`, with scales from the amaxes of past steps.

The scale is chosen by the largest amax of the last steps instead of this tensor's own, so that no reduction
has to come before quantizing (lptune/kernels/delayed.py). LowPrecision keeps the histories
(lptune/linear/steps/delayed.py). Under an 8-bit gather ranks need no collective: they have the same history.
"""

from torch import Tensor

from lptune.config import KindKeys
from lptune.kernels import quantize_delayed
from lptune.linear.kind import LinearSpec
from lptune.linear.kinds.tensorwise import Tensorwise
from lptune.numerics import QuantizedTensor


class Float8Delayed(Tensorwise):
    """One scale per tensor, taken from the amaxes of past steps."""

    name = "float8_delayed"
    keys = KindKeys(
        ("tensor", "high"), ("tensor", "high"), ("e5m2", "e4m3"), can_gather_low=True, needs_float8=True
    )
    fmt = "e4m3"
    operations = ("float8_gemm",)
    has_history = True

    def quantize(
        self, spec: LinearSpec, tensor: Tensor, layer: Tensor, operand: str, transposed: bool
    ) -> QuantizedTensor:
        """By the layer's history of the operand."""
        fmt = spec.grad_fmt if operand == "g" else spec.fmt
        return quantize_delayed(tensor, fmt, layer, operand, transposed=transposed)


KIND = Float8Delayed()
