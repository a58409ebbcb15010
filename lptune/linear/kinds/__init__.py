"""One file per `precision.kind`, with a subclass of Kind (lptune/linear/kind.py).

rowwise.py, tensorwise.py and blockwise.py have the code that several kinds share. To add a kind, add a file
here and its name below, a row in lptune/config/precision.py, and its documentation. Importing this package
fills KINDS. The import fails if this package and the config differ in their kinds or in a kind's keys.
"""

import dataclasses

from lptune.config import PRECISION_KINDS
from lptune.linear.kind import KINDS, Kind
from lptune.linear.kinds import (
    float8_blockwise,
    float8_delayed,
    float8_rowwise,
    float8_rowwise_with_gw_hp,
    float8_tensorwise,
    int8_rotated,
    int8_rowcol,
    int8_tensorwise,
    int8_weight_only,
    mxfp8,
)

__all__ = ["add"]


def add(kind: Kind) -> None:
    """Adds `kind` to KINDS. Raises ValueError if the config has no row for it, or a row with other keys."""
    row = PRECISION_KINDS.get(kind.name)
    if row is None:
        raise ValueError(f"{kind.name}: has no row in PRECISION_KINDS of lptune/config/precision.py")
    for field in (each for each in dataclasses.fields(row) if each.compare):
        ours, theirs = getattr(kind.keys, field.name), getattr(row, field.name)
        if ours != theirs:
            raise ValueError(
                f"{kind.name}: {field.name} is {theirs} in PRECISION_KINDS, and {ours} in the kind's own keys"
            )
    KINDS[kind.name] = kind


for _file in (
    int8_rowcol,
    int8_rotated,
    int8_tensorwise,
    float8_tensorwise,
    float8_delayed,
    float8_rowwise,
    float8_rowwise_with_gw_hp,
    float8_blockwise,
    mxfp8,
    int8_weight_only,
):
    add(_file.KIND)

if missing := PRECISION_KINDS.keys() - KINDS.keys() - {"none"}:
    raise ImportError(
        f"PRECISION_KINDS names {sorted(missing)}, which lptune/linear/kinds/__init__.py does not add"
    )
