"""What a checkpoint stores of a weight, whatever the weight is kept in.

A checkpoint holds no precision. Of every weight it has the plain float values, under the weight's name. A
kind of weight that is kept otherwise lists further tensors beside the values: the values can be loaded
without them, but not bit for bit.

    kept as               values under NAME        beside them                 loaded
    plain, MasterWeight   the float values         none                        in place
    Int8Weight            q * scale                int8_scale/NAME: scale      `fill_stored`

127 * s / 127 is not s for one scale in a hundred, so the scale cannot be found again from the values.
"""

from collections.abc import Mapping

from torch import Tensor

from lptune.linear.dtensors import on_this_rank
from lptune.linear.weights.int8_weight import int8_rows, row_scales

_INT8_SCALE = "int8_scale"


def is_stored_in_place(tensor: Tensor) -> bool:
    """Whether `tensor` holds the values that a checkpoint stores of it, so that these can be written there.

    Otherwise `dequantized` computes them and `fill_stored` takes them.
    """
    return int8_rows(tensor) is None


def stored_beside(weight: Tensor) -> dict[str, Tensor]:
    """What a checkpoint stores beside the values of `weight`: prefix of the name -> live tensor, sharded as
    `weight` is.
    """
    return {} if int8_rows(weight) is None else {_INT8_SCALE: row_scales(weight)}


def fill_stored(weight: Tensor, values: Tensor, beside: Mapping[str, Tensor]) -> None:
    """Overwrites a weight that is not stored in place, by what a checkpoint held.

    values: sharded as `weight`. beside: as `stored_beside` has them; what the checkpoint lacks is computed.
    """
    rows = int8_rows(weight)
    assert rows is not None
    scale = beside.get(_INT8_SCALE)
    rows.fill_from(on_this_rank(values), None if scale is None else on_this_rank(scale))
