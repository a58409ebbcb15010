"""Delayed scaling: quantize by the amaxes of past steps.

A tensor's own amax must be known before its first element can be quantized. That is a reduction on the
critical path, and for a sharded weight a collective. Delayed scaling quantizes by the largest amax of the
last steps instead, and measures the amax of this step for the next one (arXiv:2209.05433, section 3). A value
beyond the past amax saturates in this step; the next scale is large enough for it. One pass over x quantizes
and measures.

The op itself writes the measured amax into the layer's live state (record.py), so an amax is measured if and
only if the op runs. Recomputation measures the same tensor twice, which does not change a maximum. A tensor
without a history is quantized by its own amax.

`linear.DelayedScaling` keeps the histories and merges them over ranks, once a step. Two cases raise an error,
because they would be tensorwise scaling under the name of delayed scaling: a layer without histories, and a
gradient outside of a step, whose amax would enter no history. A negative layer number means that the tensor
belongs to no layer.
"""

import torch
from torch import Tensor

from lptune.kernels import native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.layout import empty_tensor, empty_tensor_both_ways, stored, stored_by_columns
from lptune.kernels.op import op
from lptune.kernels.record import LIVE, NUMBER, LayerAmaxes
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
    q, scale, _ = _quantize(x_MK, fmt, layer, operand, transposed=transposed)
    return QuantizedTensor(q, scale)


@op(fake=empty_tensor_both_ways)
def quantize_delayed_both_ways(
    x_MK: Tensor, fmt: str, layer: Tensor, operand: str
) -> tuple[QuantizedTensor, Tensor]:
    """`quantize_delayed(x_MK)` stored row by row, and its q_MK again, stored column by column."""
    q, scale, by_columns = _quantize(x_MK, fmt, layer, operand, twice=True)
    return QuantizedTensor(q, scale), by_columns


def _quantize(
    x_MK: Tensor, fmt: str, layer: Tensor, operand: str, *, transposed: bool = False, twice: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, q again). twice: q is stored row by row, and again column by column; else there is no
    second q.
    """
    amaxes, index = _amaxes(int(layer[NUMBER]), operand), OPERANDS.index(operand)
    past = x_MK.new_zeros((), dtype=torch.float32) if amaxes is None else amaxes.past_3[index]
    current = None if amaxes is None else amaxes.current_3[index]
    # A weight does not change within a step, so its last amax is enough. A NaN here skips the step anyway,
    # and does not enter the history (DelayedScaling.step).
    replace = operand == "w"
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        quantize = triton_kernels().quantize_delayed
        q, scale, by_columns = quantize(x_MK, past, current, fmt, replace, transposed, twice)
        return q, scale, by_columns
    if backend == "native" and native.has_format(fmt):
        q, scale, amax = native.quantize_tensor(x_MK, fmt, past=past)
    else:
        amax = x_MK.abs().amax().to(torch.float32) if x_MK.numel() else torch.zeros_like(past)
        scale, inverse = scale_from_amax(torch.where(past > 0, past, amax), FORMATS[fmt])
        scale = torch.where(amax.isfinite(), scale, torch.nan).reshape(1, 1)
        q = round_to(x_MK.to(torch.float32) * inverse, FORMATS[fmt])
    if current is not None:
        current.copy_(amax if replace else torch.maximum(current, amax))
    return stored(q, transposed), scale, stored_by_columns(q) if twice else q[:0]


def _amaxes(number: int, operand: str) -> LayerAmaxes | None:
    """The amaxes of layer `number`; None of no layer. Raises RuntimeError if the layer has none."""
    state = LIVE.get(number)
    amaxes = state.amaxes if state is not None else None
    if number >= 0 and (amaxes is None or (operand == "g" and not amaxes.in_step())):
        raise RuntimeError(
            "float8_delayed needs its amax histories: make low = linear.LowPrecision(model, plan, optimizer) "
            "after convert() and run the forward and backward passes of each optimizer step within "
            "`with low.step(step, num_passes):` (a copy of a converted model has "
            "none: unconvert() and convert() it)"
        )
    return amaxes
