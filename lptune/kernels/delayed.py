"""Delayed scaling: quantize by the amaxes of past steps.

A tensor's own amax must be known before its first element can be quantized. That is a reduction on the
critical path, and for a sharded weight a collective. Delayed scaling quantizes by the largest amax of the
last steps instead, and measures the amax of this step for the next one (arXiv:2209.05433, section 3). A value
beyond the past amax saturates in this step; the next scale is large enough for it. Measuring and quantizing
are two passes of plain torch here, on every device. The numerics are those of the recipe. Its speed would
need a kernel that measures while it quantizes.

The op itself writes the measured amax into the layer's live state (live.py), so an amax is measured if and
only if the op runs. Recomputation measures the same tensor twice, which does not change a maximum. A tensor
without a history is quantized by its own amax.

`linear.DelayedScaling` keeps the histories and merges them over ranks, once a step. Two cases raise an error,
because they would be tensorwise scaling under the name of delayed scaling: a layer without histories, and a
gradient outside of a step, whose amax would enter no history. A negative layer number means that the tensor
belongs to no layer.
"""

import torch
from torch import Tensor

from lptune.kernels.fakes import empty_tensor
from lptune.kernels.live import LIVE
from lptune.kernels.op import op
from lptune.kernels.record import NUMBER
from lptune.numerics import FORMATS, QuantizedTensor, round_to, scale_from_amax

OPERANDS = ("x", "w", "g")
WEIGHT = OPERANDS.index("w")


@op(fake=empty_tensor)
def quantize_delayed(
    x_MK: Tensor, fmt: str, layer: Tensor, operand: str, *, transposed: bool = False
) -> QuantizedTensor:
    """`x` quantized by one scale, from the amaxes of past steps. An inf or NaN in x makes the scale NaN.

    layer: `layer_handle`; operand: one of OPERANDS. transposed: q_MK is stored column by column.
    """
    index = OPERANDS.index(operand)
    amax = x_MK.abs().amax().to(torch.float32) if x_MK.numel() else x_MK.new_zeros((), dtype=torch.float32)
    number, chosen = int(layer[NUMBER]), amax
    state = LIVE.get(number)
    amaxes = state.amaxes if state is not None else None
    if number >= 0 and (amaxes is None or (operand == "g" and not amaxes.in_step())):
        raise RuntimeError(
            "float8_delayed needs its amax histories: make low = linear.LowPrecision(model, plan, optimizer) "
            "after convert() and run the forward and backward passes of each optimizer step within "
            "`with low.step(step, num_passes):` (a copy of a converted model has "
            "none: unconvert() and convert() it)"
        )
    if amaxes is not None:
        # A NaN here skips the step anyway, and does not enter the history (DelayedScaling.step). A weight
        # does not change within a step, so its last amax is enough.
        before = amax if operand == "w" else amaxes.current_3[index]
        amaxes.current_3[index] = torch.maximum(before, amax)
        past = amaxes.past_3[index]
        chosen = torch.where(past > 0, past, amax)
    scale, inverse = scale_from_amax(chosen, FORMATS[fmt])
    q = round_to(x_MK.to(torch.float32) * inverse, FORMATS[fmt])
    q = q.t().contiguous().t() if transposed else q.contiguous()
    return QuantizedTensor(q, torch.where(amax.isfinite(), scale, torch.nan).reshape(1, 1))
