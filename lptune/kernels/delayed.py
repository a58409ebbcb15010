"""Delayed scaling: quantize by the amaxes of past steps.

A tensor's own amax must be known before its first element can be quantized: a reduction on the critical path,
and for a sharded weight a collective. Delayed scaling takes the largest amax of the last steps instead and
measures this one's for the next step (arXiv:2209.05433, section 3). What grows past its history saturates,
once. Here the two are separate passes of plain torch on every device: the numerics of the recipe are there,
its speed wants a kernel that measures while it quantizes.

The measurements are written from inside the op into the layer's live state (live.py): what an opaque op does
at run time really happened. Recomputation measures the same tensor twice, which a
maximum does not notice. Before there is a history, a tensor's own amax is used.

`linear.DelayedScaling` keeps the histories and merges them over ranks, once a step. A layer that none of them
knows is an error, and so is a gradient outside of a step, which would enter no history: both would train by
tensorwise scaling under the name of delayed scaling. A negative number is no layer: a tensor by itself.
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
    """`x` by the scale of its history. layer: `layer_handle`; operand: one of OPERANDS. transposed: q_MK is
    stored column by column.

    An inf or NaN in x makes the scale NaN, as everywhere.
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
        # A maximum with NaN is NaN: that step is lost anyway, and the history is not (DelayedScaling.step).
        # A weight is one and the same for a whole step.
        before = amax if operand == "w" else amaxes.current_3[index]
        amaxes.current_3[index] = torch.maximum(before, amax)
        past = amaxes.past_3[index]
        chosen = torch.where(past > 0, past, amax)
    scale, inverse = scale_from_amax(chosen, FORMATS[fmt])
    q = round_to(x_MK.to(torch.float32) * inverse, FORMATS[fmt])
    q = q.t().contiguous().t() if transposed else q.contiguous()
    return QuantizedTensor(q, torch.where(amax.isfinite(), scale, torch.nan).reshape(1, 1))
