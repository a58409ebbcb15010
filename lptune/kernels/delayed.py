"""Delayed scaling: quantize by the amaxes of past steps.

A tensor's own amax must be known before its first element can be quantized: a reduction on the critical path,
and for a sharded weight a collective. Delayed scaling takes the largest amax of the last steps instead and
measures this one's on the way, for the next step (arXiv:2209.05433, section 3). What grows past its history
saturates, once.

The measurements are kept here, by layer, written from inside the op: the same place as the counters of
executed GEMMs (record.py), and for the same reason. Recomputation measures the same tensor twice, which a
maximum does not notice. Before there is a history, a tensor's own amax is used.

`linear.DelayedScaling` merges them over ranks, once a step.
"""

import torch
from torch import Tensor

from lptune.numerics import FORMATS, QuantizedTensor, quantize_with_scale, scale_from_amax

OPERANDS = ("x", "w", "g")


class LayerAmaxes:
    """Of one layer, one number for each of OPERANDS; float32 tensors of shape (3,) on the layer's device."""

    def __init__(self, device: torch.device) -> None:
        self.past = torch.zeros(3, device=device)
        """Largest amax of the steps remembered; 0: none."""
        self.current = torch.zeros(3, device=device)
        """Largest amax of this step so far."""


_layers: dict[int, LayerAmaxes] = {}


def layer_amaxes(number: int, device: torch.device) -> LayerAmaxes:
    """Those of the layer with this number, made on first use."""
    if number not in _layers:
        _layers[number] = LayerAmaxes(device)
    return _layers[number]


def forget_amaxes(number: int) -> None:
    """When a layer is converted or released: numbers are unique, but memory is not endless."""
    _layers.pop(number, None)


def quantize_delayed(x_MK: Tensor, fmt: str, layer: Tensor, operand: str) -> QuantizedTensor:
    """`x` by the scale of its history. layer: `layer_handle`; operand: one of OPERANDS.

    An inf or NaN in x makes the scale NaN, as everywhere.
    """
    return QuantizedTensor(*_quantize_delayed(x_MK, fmt, layer, OPERANDS.index(operand)))


@torch.library.custom_op("lptune::quantize_delayed", mutates_args=())
def _quantize_delayed(x_MK: Tensor, fmt: str, layer: Tensor, operand: int) -> tuple[Tensor, Tensor]:
    amaxes = layer_amaxes(int(layer), x_MK.device)
    amax = x_MK.abs().amax().to(torch.float32) if x_MK.numel() else torch.zeros((), device=x_MK.device)
    # A maximum with NaN is NaN: the step is lost anyway, and the history is not (DelayedScaling.update).
    amaxes.current[operand] = torch.maximum(amaxes.current[operand], amax)
    past = amaxes.past[operand]
    scale = scale_from_amax(torch.where(past > 0, past, amax), FORMATS[fmt]).scale
    q = quantize_with_scale(x_MK, scale, FORMATS[fmt])
    return q.contiguous(), torch.where(amax.isfinite(), scale, torch.nan).reshape(1, 1)


@_quantize_delayed.register_fake
def _(x_MK: Tensor, fmt: str, layer: Tensor, operand: int) -> tuple[Tensor, Tensor]:
    q = x_MK.new_empty(x_MK.shape, dtype=FORMATS[fmt].dtype)
    return q, x_MK.new_empty((1, 1), dtype=torch.float32)
