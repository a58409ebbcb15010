"""`int8_rotated`: `int8_rowcol` after a rotation, for activations with outlier channels or tokens.

Hadamard blocks of 128 spread an outlier over its block before x, W and g are quantized
(lptune/numerics/rotation.py). H is orthogonal, so each GEMM has the same result with both operands rotated
along its contraction:

    output         (x H)(W H).T             x H row,     W H row
    grad_input     (g * s (q of W H)) H     g * s row,   W H as in `output`; the result is rotated back
    grad_weight    (H g).T (H x)            H g column,  H x column; H mixes tokens here

So one set of 8-bit values of W H serves forward, backward and the 8-bit gather, and rows stay whole: a rank
rotates and quantizes its own rows. grad_input contracts over N, along which W H is not rotated: g keeps its
outliers there. A rotation costs 7 additions per element, no GEMM and no collective.
"""

from lptune.config import KindKeys
from lptune.linear.kinds.rowwise import Rowwise


class Int8Rotated(Rowwise):
    """One scale per row or column of the rotated operands, INT8."""

    name = "int8_rotated"
    keys = KindKeys(
        ("folded", "high"), ("column", "high"), ("int8",), can_round_stochastically=True, can_gather_low=True
    )
    fmt = "int8"
    rotated = True
    operations = ("int8_gemm",)


KIND = Int8Rotated()
