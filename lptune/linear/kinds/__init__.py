"""The kinds of `precision.kind`, by family: what scales cover.

To add a kind, add a subclass of Kind (lptune/linear/kind.py) here and its name below, a row in
lptune/config/precision.py, and its documentation. Importing this package fills KINDS. The import fails if
this package and the config differ in their kinds.
"""

from lptune.config import PRECISION_KINDS
from lptune.linear.kind import KINDS
from lptune.linear.kinds.bitnet import Bitnet
from lptune.linear.kinds.blockwise import Float8Blockwise, Mxfp8
from lptune.linear.kinds.nvfp4 import Nvfp4
from lptune.linear.kinds.rowwise import Float8Rowwise, Float8RowwiseWithGwHp, Int8Rotated, Int8Rowcol
from lptune.linear.kinds.tensorwise import Float8Delayed, Float8Tensorwise, Int8Tensorwise
from lptune.linear.kinds.weight_only import Int4Weight, Int8WeightOnly

KINDS.update(
    (kind.name, kind)
    for kind in (
        Int8Rowcol(),
        Int8Rotated(),
        Int8Tensorwise(),
        Float8Tensorwise(),
        Float8Delayed(),
        Float8Rowwise(),
        Float8RowwiseWithGwHp(),
        Float8Blockwise(),
        Mxfp8(),
        Nvfp4(),
        Int8WeightOnly(),
        Int4Weight(),
        Bitnet(),
    )
)

if differing := KINDS.keys() ^ (PRECISION_KINDS.keys() - {"none"}):
    raise ImportError(
        f"{', '.join(sorted(differing))}: a kind has a row in PRECISION_KINDS of lptune/config/precision.py, "
        "and its class in lptune/linear/kinds/__init__.py"
    )
