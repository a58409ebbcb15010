"""`float8_rowwise_with_gw_hp`: `float8_rowwise` with grad_weight in the compute dtype.

grad_weight contracts over tokens, and an outlier token coarsens the scales of columns most. Running one of
the three GEMMs in compute dtype gives up a third of the saving.
"""

from lptune.config import KindKeys
from lptune.linear.kinds.float8_rowwise import Float8Rowwise


class Float8RowwiseWithGwHp(Float8Rowwise):
    """Float8Rowwise with grad_weight in the compute dtype."""

    name = "float8_rowwise_with_gw_hp"
    keys = KindKeys(
        ("folded", "column", "requantized", "high"),
        ("high",),
        ("e4m3",),
        can_round_stochastically=True,
        can_gather_low=True,
        needs_float8=True,
    )


KIND = Float8RowwiseWithGwHp()
