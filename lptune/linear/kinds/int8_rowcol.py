"""`int8_rowcol`: INT8 with one scale per row or column.

This kind runs on NVIDIA GPUs since Ampere, and on CPUs. Its three GEMMs:

    output         x row,        W row
    grad_input     g * s_W row,  W as in `output`   (folded; see rowwise.py)
    grad_weight    g column,     x column
"""

from lptune.config import KindKeys
from lptune.linear.kinds.rowwise import Rowwise


class Int8Rowcol(Rowwise):
    """One scale per row or column, INT8."""

    name = "int8_rowcol"
    keys = KindKeys(
        ("folded", "column", "requantized", "high"),
        ("column", "folded", "high"),
        ("int8",),
        can_round_stochastically=True,
        can_gather_low=True,
        tokens_low="folded",
    )
    fmt = "int8"
    operations = ("int8_gemm",)


KIND = Int8Rowcol()
