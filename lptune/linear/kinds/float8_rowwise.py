"""`float8_rowwise`: e4m3 with one scale per row or column. All scales are powers of two.

The GEMMs are those of int8_rowcol.py in float8. Scales that are powers of two make dequantizing to bfloat16
exact. g is e4m3 too: one row has a smaller range of values than the whole tensor, so it does not need the
range of e5m2.
"""

from lptune.config import KindKeys
from lptune.linear.kinds.rowwise import Rowwise


class Float8Rowwise(Rowwise):
    """One scale per row or column, each a power of two; e4m3."""

    name = "float8_rowwise"
    keys = KindKeys(
        ("folded", "column", "requantized", "high"),
        ("column", "folded", "high"),
        ("e4m3",),
        can_round_stochastically=True,
        can_gather_low=True,
        tokens_low="folded",
        needs_float8=True,
    )
    fmt = "e4m3"
    power_of_two = True
    operations = ("float8_gemm", "float8_rowwise_gemm")


KIND = Float8Rowwise()
