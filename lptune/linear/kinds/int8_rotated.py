"""`int8_rotated`: `int8_rowcol` after a rotation, for activations with outlier channels.

Hadamard blocks of 128 spread an outlier over its block before x and W are quantized by rows
(lptune/numerics/rotation.py). H is orthogonal and its own inverse, so

    output         (x H)(W H).T             x H row,          W H row
    grad_input     (g * s (q of W H)) H     g * s_W row,      W H as in `output`
    grad_weight    ((g * s).T (q of x H)) H g * s_x column,   x H as in `output`

Each operand is rotated and quantized once: W H for forward, backward and the 8-bit gather (rows stay whole,
and a rank rotates its own), and x H for both of its GEMMs, so that x is saved for backward in 8 bits. The
scales of rows are folded into g: a token without a gradient has no weight in grad_weight, however large it
is. A rotation costs 7 additions per element, no GEMM and no collective.
"""

from lptune.config import KindKeys
from lptune.linear.kinds.rowwise import Rowwise


class Int8Rotated(Rowwise):
    """One scale per row or column of the rotated operands, INT8."""

    name = "int8_rotated"
    keys = KindKeys(
        ("folded", "high"),
        ("folded", "high"),
        ("int8",),
        can_round_stochastically=True,
        can_gather_low=True,
        tokens_low="folded",
    )
    fmt = "int8"
    rotated = True
    operations = ("int8_gemm",)


KIND = Int8Rotated()
