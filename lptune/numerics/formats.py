"""The 8-bit number formats.

INT8 is symmetric: [-127, 127]. -128 is never produced, so that a value and its negative quantize alike and a
contraction of 133,144 products still fits an int32 accumulator (127 * 127 * 133,144 < 2**31).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """An 8-bit storage format: values are multiples of a step (integers) up to `max`."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest magnitude; a scale is amax / max."""


INT8 = Format("int8", torch.int8, 127.0)

# Longest contraction of int8 products that an int32 accumulator holds for certain.
INT32_SAFE_CONTRACTION = (2**31 - 1) // (127 * 127)
