"""Operands of a GEMM with the errors of their rounding: what kinds say of theirs, and bounds.py adds up.

    exact(x)                      not rounded
    rounded(x, block, fmt, …)     quantized with one scale per block of x
    dequantized(w, …)             quantized, dequantized and rounded to the dtype

All tensors are float64. Rounding makes noise, of which the variance is known, and where a value lies near
zero a known error (lptune/numerics/error.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lptune.numerics import (
    FORMATS,
    Noise,
    dequantize_blocks,
    expand_blocks,
    quantize_blocks,
    rounding_noise,
)


class Operand(NamedTuple):
    """An operand of a GEMM and what was done to it, all float64, as it is multiplied."""

    value: Tensor
    mean: Tensor
    """Known errors."""
    variance: Tensor
    """Of unknown ones."""

    def t(self) -> "Operand":
        """The operand with its two dims exchanged."""
        return Operand(self.value.t(), self.mean.t(), self.variance.t())

    def plus(self, other: Noise) -> "Operand":
        """With the errors of another rounding added."""
        return Operand(self.value, self.mean + other.mean, self.variance + other.variance)

    def times(self, factor: Tensor) -> "Operand":
        """Multiplied by an exact factor, and its errors with it."""
        return Operand(self.value * factor, self.mean * factor, self.variance * factor.square())


Operands = tuple[Operand, Operand]
"""a and b of `a @ b`."""


def exact(value: Tensor) -> Operand:
    """`value` as an operand without errors."""
    value64 = value.to(torch.float64)
    return Operand(value64, torch.zeros_like(value64), torch.zeros_like(value64))


def rounded(
    tensor_MK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool, stochastic: bool = False
) -> Operand:
    """`tensor` quantized to `fmt` with one scale per `block` (rows, columns)."""
    noise = rounding_noise(tensor_MK, block, FORMATS[fmt], power_of_two=power_of_two, stochastic=stochastic)
    return exact(tensor_MK).plus(noise)


def dequantized(w_NK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool) -> Operand:
    """`w` quantized, dequantized and rounded to its dtype."""
    noise = rounded(w_NK, block, fmt, power_of_two=power_of_two)
    return noise.plus(cast_error(w_NK, block, fmt, power_of_two=power_of_two))


def cast_error(w_NK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool) -> Noise:
    """What rounding the dequantized W to its dtype adds. No noise but a known error: the 8-bit values and the
    scales are those of this very W. In bfloat16 there is none where scales are powers of two.
    """
    quantized = quantize_blocks(w_NK, block, FORMATS[fmt], power_of_two=power_of_two)
    q_NK, scale_NK = quantized.q_MK, expand_blocks(quantized.scale, block, (w_NK.shape[0], w_NK.shape[1]))
    exactly = q_NK.to(torch.float64) * scale_NK.to(torch.float64)
    return known(dequantize_blocks(quantized, block, w_NK.dtype).to(torch.float64) - exactly)


def known(mean: Tensor) -> Noise:
    """An error that is known element by element."""
    return Noise(mean, torch.zeros_like(mean))
