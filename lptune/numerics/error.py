"""Error measures: how far a result is from the truth, and how far the format predicts it to be.

Rounding to a step d adds noise of variance d**2 / 12. For INT8 the step is the scale for all elements: with d
= amax / 127, the relative noise of a row is `(amax / rms) / (127 * sqrt(12))`. For float8 the step depends on
the value. A GEMM of two quantized operands adds their variances (lptune/linear/bounds.py).

`predicted_relative_error` assumes that values are spread evenly within the steps. Two cases make it too high.
If an outlier makes the step larger than the other values, these become 0, with an error of x**2 instead of
d**2 / 12. And an amax becomes the largest number of the format, without an error (in blocks of 32, that is
one element in 32). `rounding_noise` handles both cases.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.numerics.formats import INT8, Format
from lptune.numerics.quantize import expand_blocks, quantize_blocks


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """‖actual - truth‖ / ‖truth‖ in float64 (NaN if either holds one)."""
    truth64 = truth.detach().to(torch.float64)
    return float((actual.detach().to(torch.float64) - truth64).norm() / truth64.norm())


def sqnr_db(actual: Tensor, truth: Tensor) -> float:
    """Signal to quantization noise in dB; larger is better. inf means that nothing was quantized."""
    error = relative_error(actual, truth)
    return math.inf if error == 0 else -20 * math.log10(error)


def predicted_relative_error(
    x: Tensor, dim: int | tuple[int, ...], fmt: Format = INT8, *, power_of_two: bool = False
) -> float:
    """Expected ‖dequantize(quantize(x)) - x‖ / ‖x‖, from the format's step at each value alone.

    x: (M, K), any float dtype, finite, not all zero. dim: the dims that share a scale: 1 for row scales, 0
    for column scales, (0, 1) for one scale.
    """
    m, k = x.shape
    block = {1: (1, k), 0: (m, 1), (0, 1): (m, k)}[dim]
    return predicted_block_error(x, block, fmt, power_of_two=power_of_two)


def predicted_block_error(
    x: Tensor, block: tuple[int, int], fmt: Format, *, power_of_two: bool = False
) -> float:
    """`predicted_relative_error` for one scale per `block` (rows, columns)."""
    step = quantization_step(x, block, fmt, power_of_two=power_of_two)
    # Every format contains zero.
    noise = torch.where(x == 0, 0.0, step.square() / 12)
    return float(noise.sum().sqrt() / x.to(torch.float64).norm())


class Noise(NamedTuple):
    """The predicted error `dequantize(quantize(x)) - x` of each element; float64."""

    mean: Tensor
    variance: Tensor


def rounding_noise(
    x: Tensor, block: tuple[int, int], fmt: Format, *, power_of_two: bool = False, stochastic: bool = False
) -> Noise:
    """The error of quantizing x, (M, K), with one scale per `block` (rows, columns).

    An element is rounded to one of its two neighbours in the format, and its position between them is taken
    as uniform: mean 0, variance step**2 / 12. Two kinds of elements are known exactly. Values within one and
    a half steps of zero become 0 or the next number; beside a large outlier, most values of a row do. Their
    error is computed, not treated as noise. So is that of values within one and a half steps of the largest
    number: the amax becomes it exactly, and where one element of a rotated row dominates, the row is there.

    stochastic: the element is rounded up with probability f, its distance from the lower neighbour in steps:
    mean 0, variance step**2 * f * (1 - f).
    """
    scale, scaled = _scaled(x, block, fmt, power_of_two)
    spacing = fmt.spacing(scaled)
    if stochastic:
        is_largest = scaled.abs() > fmt.max * (1 - 2.0**-22)  # the scale was rounded
        fraction = (scaled / spacing) % 1
        mean, variance = torch.zeros_like(scaled), spacing.square() * fraction * (1 - fraction)
    else:
        last_step = fmt.spacing(scaled.new_tensor(fmt.max))
        below = (fmt.max - scaled.abs()).clamp(min=0.0) / last_step
        is_largest = below < 1.5
        smallest = fmt.spacing(torch.zeros_like(scaled))
        is_small = scaled.abs() < 1.5 * smallest
        mean = torch.where(is_small, (scaled / smallest).round() * smallest - scaled, 0.0)
        largest = scaled.sign() * (fmt.max - below.round() * last_step)
        mean = torch.where(is_largest, largest - scaled, mean)
        variance = torch.where(is_small, 0.0, spacing.square() / 12)
    return Noise(scale * mean, scale.square() * torch.where(is_largest, 0.0, variance))


def quantization_step(
    x: Tensor, block: tuple[int, int], fmt: Format, *, power_of_two: bool = False
) -> Tensor:
    """Distance between the two neighbours of each element of x in the format; float64, shape of x."""
    scale, scaled = _scaled(x, block, fmt, power_of_two)
    return scale * fmt.spacing(scaled)


def _scaled(x: Tensor, block: tuple[int, int], fmt: Format, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(scale, x / scale), both expanded to the shape of x, float64."""
    m, k = x.shape
    scales = quantize_blocks(x, block, fmt, power_of_two=power_of_two).scale
    scale64 = expand_blocks(scales, block, (m, k)).to(torch.float64)
    return scale64, torch.where(scale64 > 0, x.to(torch.float64) / scale64, 0.0)
