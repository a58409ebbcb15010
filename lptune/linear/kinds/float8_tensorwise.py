"""`float8_tensorwise`: e4m3, gradients in e5m2, with one scale per tensor (tensorwise.py)."""

from lptune.config import KindKeys
from lptune.linear.kinds.tensorwise import Tensorwise


class Float8Tensorwise(Tensorwise):
    """One scale per tensor; e4m3, and e5m2 for gradients."""

    name = "float8_tensorwise"
    keys = KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("e5m2", "e4m3"),
        can_round_stochastically=True,
        can_gather_low=True,
        tokens_low="tensor",
        needs_float8=True,
        min_sqnr_db=15.0,
    )
    fmt = "e4m3"
    operations = ("float8_gemm",)


KIND = Float8Tensorwise()
