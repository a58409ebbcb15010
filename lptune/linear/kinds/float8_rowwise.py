"""`float8_rowwise`: e4m3 with one scale per row or column, all of them powers of two.

The GEMMs of int8_rowcol.py in float8. A power of two is exact in bfloat16, so that dequantizing rounds
nothing. g is e4m3 as well: a scale per row leaves it less of a range to cover than one per tensor.
"""

from lptune.config import KindKeys
from lptune.linear.kinds.rowwise import Rowwise


class Float8Rowwise(Rowwise):
    """One scale per row or column, e4m3, scales that are powers of two."""

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
