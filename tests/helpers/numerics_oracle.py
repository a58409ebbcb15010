"""The 8-bit formats decoded from their bits by hand, and nearest-even rounding decided by a sorted table.

Nothing here uses torch's float8 types: what is tested must not be its own judge. Sources: OCP 8-bit floating
point specification 1.0, table 1 (e4m3: bias 7, no infinity, NaN only at exponent and mantissa all ones; e5m2:
bias 15, IEEE's infinities and NaNs), and OCP MX 1.0 for E8M0 (2**(bits - 127), 0xff is NaN).
"""

import bisect
import itertools
import math
from fractions import Fraction

import torch
from torch import Tensor

from lptune.numerics import Format


def decode(fmt: Format, bits: int) -> float:
    """The number that a byte stands for."""
    if fmt.dtype == torch.int8:
        return float(bits - 256 if bits >= 128 else bits)
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt.name]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if fmt.name == "e4m3" and bits & 0x7F == 0x7F:
        return math.nan
    if fmt.name == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:  # no hidden bit
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def numbers(fmt: Format) -> list[float]:
    """All finite numbers within [-max, max], ascending, one zero: INT8's -128 is none of ours."""
    values = {decode(fmt, bits) + 0.0 for bits in range(256)}  # + 0.0 turns -0 into 0
    return sorted(value for value in values if abs(value) <= fmt.max)


def boundaries(fmt: Format) -> list[float]:
    """Halfway between neighbours, exact: where rounding to nearest changes its result."""
    return [float((Fraction(a) + Fraction(b)) / 2) for a, b in itertools.pairwise(numbers(fmt))]


def nearest_even(fmt: Format, values: Tensor) -> Tensor:
    """Each of `values` rounded to the nearest number, ties to the one whose last bit is 0; float64.

    A tie is between numbers i and i + 1 of the sorted list. Zero has an even last bit and neighbours differ
    in it, so the even one is at an even distance from zero in the list.
    """
    table = numbers(fmt)
    zero = table.index(0.0)
    rounded = []
    for value in values.to(torch.float64).flatten().tolist():
        above = min(bisect.bisect_left(table, value), len(table) - 1)
        below = max(above - 1, 0)
        down, up = Fraction(value) - Fraction(table[below]), Fraction(table[above]) - Fraction(value)
        if abs(down) == abs(up):
            rounded.append(table[below if (below - zero) % 2 == 0 else above])
        else:
            rounded.append(table[below if abs(down) < abs(up) else above])
    return torch.tensor(rounded, dtype=torch.float64).view(values.shape)
