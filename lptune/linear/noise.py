"""Operands of a GEMM with the errors of their rounding. Kinds make them; bounds.py adds up the errors.

An operand has the values before rounding, and beside them the errors that rounding will add:

    exact(x)                      no errors
    rounded(x, block, fmt, …)     of quantizing x, with one scale per block of x
    dequantized(w, …)             of quantizing w, dequantizing it and rounding it to w's dtype

x and w have any float dtype; operands are float64. Of most errors only the variance is known: they are noise.
Values near zero become 0 or the number next to it, so their errors are computed (lptune/numerics/error.py).
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
    rotate,
    rounding_noise,
)


class Operand(NamedTuple):
    """An operand of a GEMM and the errors of its elements. The three tensors have equal shapes, float64."""

    value: Tensor
    """The values that would be multiplied without rounding; a folded scale is part of them."""
    mean: Tensor
    """The known error of each element."""
    variance: Tensor
    """The variance of the rest of each element's error, the noise."""

    def t(self) -> "Operand":
        """The operand transposed, with its errors."""
        return Operand(self.value.t(), self.mean.t(), self.variance.t())

    def plus(self, other: Noise) -> "Operand":
        """The operand with the errors of another rounding added."""
        return Operand(self.value, self.mean + other.mean, self.variance + other.variance)

    def times(self, factor: Tensor) -> "Operand":
        """The operand multiplied by an exact factor, which scales its errors too."""
        return Operand(self.value * factor, self.mean * factor, self.variance * factor.square())


Operands = tuple[Operand, Operand]
"""The operands a and b of `a @ b`."""


def exact(value: Tensor) -> Operand:
    """`value` in float64 as an operand without errors."""
    value64 = value.to(torch.float64)
    return Operand(value64, torch.zeros_like(value64), torch.zeros_like(value64))


def rounded(
    tensor_MK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool, stochastic: bool = False
) -> Operand:
    """`tensor_MK` with the errors of quantizing it to `fmt` with one scale per `block` (rows, columns).

    For the 8-bit formats. It takes a value's place between its two neighbours as uniform, which is not so for
    a format of few steps: with 7 the prediction was 0.15 % too low. There, describe the error as known:
    `exact(tensor_MK).plus(known(dequantized - tensor_MK))`, as tests/linear/test_toy_kind.py does.
    """
    noise = rounding_noise(tensor_MK, block, FORMATS[fmt], power_of_two=power_of_two, stochastic=stochastic)
    return exact(tensor_MK).plus(noise)


def dequantized(
    w_NK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool, rotated: bool = False
) -> Operand:
    """`w_NK` with the errors of quantizing it, dequantizing it and rounding it to its dtype.

    rotated: it is rotated before, and rotated back before the last rounding. The operand stays rotated: only
    there are the errors of elements independent.
    """
    if not rotated:
        operand = rounded(w_NK, block, fmt, power_of_two=power_of_two)
        return operand.plus(cast_error(w_NK, block, fmt, power_of_two=power_of_two))
    rotated_NK = rotate(w_NK)
    quantized = quantize_blocks(rotated_NK, block, FORMATS[fmt], power_of_two=power_of_two)
    back_NK = rotate(dequantize_blocks(quantized, block))
    cast_NK = rotate(back_NK.to(w_NK.dtype).to(torch.float32) - back_NK)
    operand = rounded(rotated_NK, block, fmt, power_of_two=power_of_two)
    return operand.plus(known(cast_NK.to(torch.float64)))


def cast_error(w_NK: Tensor, block: tuple[int, int], fmt: str, *, power_of_two: bool) -> Noise:
    """The error of rounding the dequantized W, q * scale, to W's dtype. It is computed from q and scale, not
    taken as noise: noise is independent, but elements of a block with equal q have equal errors. It is 0 if
    scales are powers of two: q has at most 7 significant bits, and bfloat16 keeps 8.
    """
    quantized = quantize_blocks(w_NK, block, FORMATS[fmt], power_of_two=power_of_two)
    q_NK, scale_NK = quantized.q_MK, expand_blocks(quantized.scale, block, (w_NK.shape[0], w_NK.shape[1]))
    product_NK = q_NK.to(torch.float64) * scale_NK.to(torch.float64)
    return known(dequantize_blocks(quantized, block, w_NK.dtype).to(torch.float64) - product_NK)


def known(mean: Tensor) -> Noise:
    """A known error of each element, without variance."""
    return Noise(mean, torch.zeros_like(mean))
