"""`int8_tensorwise`: INT8 with one scale per tensor.

Of the INT8 kinds it costs least to quantize. Of all kinds it is the coarsest: the rounding step is equally
large for the smallest and the largest value of a tensor (tensorwise.py).
"""

from lptune.config import KindKeys
from lptune.linear.kinds.tensorwise import Tensorwise


class Int8Tensorwise(Tensorwise):
    """One scale per tensor, INT8."""

    name = "int8_tensorwise"
    keys = KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("int8",),
        can_round_stochastically=True,
        can_gather_low=True,
        tokens_low="tensor",
        min_sqnr_db=9.0,
    )
    fmt = "int8"
    operations = ("int8_gemm",)


KIND = Int8Tensorwise()
