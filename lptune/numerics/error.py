"""How far a result is from the truth, and how far the format says it should be.

Rounding to a step d adds noise of variance d**2 / 12. With d = amax / 127 for each row, an operand's relative
noise is `(amax / rms) / (127 * sqrt(12))`; a GEMM of two such operands adds their variances.
"""

import math

import torch
from torch import Tensor

from lptune.numerics.formats import INT8, Format


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """‖actual - truth‖ / ‖truth‖ in float64 (NaN if either holds one)."""
    truth64 = truth.to(torch.float64)
    return float((actual.to(torch.float64) - truth64).norm() / truth64.norm())


def sqnr_db(actual: Tensor, truth: Tensor) -> float:
    """Signal to quantization noise, dB: larger is better; inf says that nothing was quantized."""
    error = relative_error(actual, truth)
    return math.inf if error == 0 else -20 * math.log10(error)


def predicted_relative_error(x: Tensor, dim: int, fmt: Format = INT8) -> float:
    """Expected ‖dequantize(quantize(x)) - x‖ / ‖x‖ for one scale along `dim`, from the step alone."""
    x64 = x.to(torch.float64)
    step = x64.abs().amax(dim=dim, keepdim=True) / fmt.max
    return float((step.square() / 12).expand_as(x64).sum().sqrt() / x64.norm())
