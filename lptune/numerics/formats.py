"""The 8-bit number formats.

INT8 is a fixed-point format: all steps between neighbours are equal. Here it is symmetric, [-127, 127]: -128
is never produced, so that a value and its negative are quantized alike, and a contraction of 133,144 products
fits an int32 accumulator (127 * 127 * 133,144 < 2**31).

e4m3 and e5m2 are floating-point formats (arXiv:2209.05433): the step grows with the value, so that small
values beside an outlier keep their relative precision. e4m3 has one more bit of precision, e5m2 has the range
of float16. Gradients often need the range, weights and activations the precision.

E8M0 holds powers of two only. It is the format of the scale of an MX block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """An 8-bit format: integers up to `max`, or floating point if `mantissa_bits` is given."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest magnitude; a scale is amax / max."""
    mantissa_bits: int | None = None
    """Stored bits of the significand of a floating-point format; None for integers."""
    min_exponent: int = 0
    """Exponent of the smallest normal number; below it the step no longer shrinks."""

    def spacing(self, values: Tensor) -> Tensor:
        """Distance between the two neighbours of each value in the format; float64, same shape. For a number
        of the format: the distance to the next number away from zero.

        values: finite, already divided by their scale.
        """
        if self.mantissa_bits is None:
            return torch.ones_like(values, dtype=torch.float64)
        # frexp: |v| = m * 2**e with m in [0.5, 1), so the exponent of the leading bit is e - 1.
        exponent = torch.frexp(values.to(torch.float64).abs()).exponent - 1
        # Zero has no leading bit (frexp says exponent 0); its neighbours are the smallest subnormals.
        exponent = exponent.where(values != 0, self.min_exponent).clamp(min=self.min_exponent)
        return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - self.mantissa_bits)


INT8 = Format("int8", torch.int8, 127.0)
E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, mantissa_bits=2, min_exponent=-14)

E2M1 = Format("e2m1", torch.float8_e4m3fn, 6.0, mantissa_bits=1, min_exponent=0)
"""Four bits, held in e4m3, which has all its numbers. Not in FORMATS, it has other scales (nvfp4.py)."""

INT4 = Format("int4", torch.int8, 7.0)
"""Codes of -7 to 7 in int8. Not in FORMATS, since no kernel multiplies in it (groups.py)."""

FORMATS = {fmt.name: fmt for fmt in (INT8, E4M3, E5M2)}

# Longest contraction of int8 products that cannot overflow an int32 accumulator.
INT32_SAFE_CONTRACTION = (2**31 - 1) // (127 * 127)
