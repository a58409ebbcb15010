"""How a checkpoint stores a weight.

A checkpoint does not depend on the precision: it stores the float values of every weight, under the weight's
name. A quantized weight lists further tensors, stored beside its values. A checkpoint can be loaded without
them, but the weight is then not bitwise equal.

    weight                    values under NAME        beside them                 loaded
    ordinary, MasterWeight    the float values         none                        in place
    Int8Weight                q * scale                int8_scale/NAME: scale      `fill_stored`

The scale cannot be recomputed from the values: they may be rounded to bfloat16, and after stochastic rounding
a row may have no 127.
"""

from collections.abc import Mapping

from torch import Tensor

from lptune.linear.dtensors import on_this_rank
from lptune.linear.weights.int8_weight import int8_rows, row_scales

INT8_SCALE = "int8_scale"
"""The prefix of an Int8Weight's scales, (N, 1) float32."""


def is_stored_in_place(tensor: Tensor) -> bool:
    """Whether the values that a checkpoint stores can be loaded into `tensor` in place.

    If not, `dequantized` computes these values for saving, and `fill_stored` loads them.
    """
    return int8_rows(tensor) is None


def stored_beside(weight: Tensor) -> dict[str, Tensor]:
    """The live tensors that a checkpoint stores beside the values of `weight`, by the prefix of their name.
    They have the placements of `weight`.
    """
    return {} if int8_rows(weight) is None else {INT8_SCALE: row_scales(weight)}


def fill_stored(weight: Tensor, values: Tensor, beside: Mapping[str, Tensor]) -> None:
    """Fills a weight that is not stored in place, with tensors of a checkpoint.

    values: with the placements of `weight`. beside: by prefix, as in `stored_beside`; a scale that the
    checkpoint lacks is computed from the values.
    """
    rows = int8_rows(weight)
    assert rows is not None
    scale = beside.get(INT8_SCALE)
    rows.fill_from(on_this_rank(values), None if scale is None else on_this_rank(scale))
