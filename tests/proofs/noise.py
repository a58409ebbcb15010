"""Predicts the error of each of the three GEMMs from the formats alone.

Rounding an element to multiples of a step d adds independent noise of mean 0 and variance d**2 / 12. Near
zero the error is not noise: it is known (`rounding_noise`). For a GEMM `c = a @ b` of two rounded
operands, the expected squared error is

    E ‖c' - c‖² = ‖m‖² + sum over k of  va_k * B_k  +  A_k * vb_k  +  va_k * vb_k

where m is the contribution of the known errors, A_k and va_k are the sums of squares and of variances over
a's column k, and B_k and vb_k the same over b's row k. For operands without structure this adds the relative
errors of both operands as variances. Because each k has its own weight, the formula also holds where channels
or tokens differ by orders of magnitude, as in real activations.

The deviation of a single draw from this expectation follows from the same noise. `‖c' - c‖²` is a quadratic
form in the noise. For each row of a, its variance is at most 2 * sum over k, l of v_k G_kl**2 v_l, where G is
the Gram matrix of b's rows (equality for Gaussian noise; uniform noise varies less). The known errors add
4 * sum of v * (m @ b.T)**2 to the variance. `bound` is the expectation plus four standard deviations.

`low_operands` says for each family of kinds which operands it multiplies and how it rounds them. A folded
operand is described as it is multiplied: the noise of g * s, and the noise of W divided by s. A kind outside
of these families registers itself: `@low_operands.register`, as tests/linear/test_toy_kind.py does.

`least` is the expectation minus four standard deviations, without the rounding of the compute dtype. An error
below `least` is a fault like an error above `bound`: the layer did not compute what its spec says.

What is not of the formats is bounded, too: rounding of float32 sums and of results to the compute dtype, with
four standard deviations, which count where one element dominates; its product with the known errors; and
numbers below the smallest normal one, which have an absolute step, and which some units flush to zero.

The formulas assume independent errors, but equal values are rounded equally. Whole rows repeat, for example
the rows of a repeated token before the first attention. Equal rows are therefore counted as one row: without
this, grad_weight of the first q, k and v of a trained Llama exceeds the bound by a factor of up to 1.5.
(Stochastic rounding would round equal rows independently.) Values on a grid as coarse as the format's grid
have a smaller error than predicted. Where single values repeat, errors need not average out: in the head of a
model, the gradient of every token has -1 + p at its label, and all other p are equal in an untrained model.
The largest possible error, half a step everywhere, is sqrt(3) times the noise that is assumed here.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune import numerics
from lptune.linear import Kind, LinearSpec
from lptune.linear.kinds.bitnet import Bitnet
from lptune.linear.kinds.blockwise import Blockwise
from lptune.linear.kinds.nvfp4 import Nvfp4
from lptune.linear.kinds.rowwise import Rowwise
from lptune.linear.kinds.tensorwise import Tensorwise
from lptune.linear.kinds.weight_only import Int4Weight, Int8WeightOnly
from lptune.numerics import (
    FORMATS,
    INT8,
    Format,
    dequantize_blocks,
    expand_blocks,
    quantize_blocks,
    rotate,
)


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
    noise = rounding_noise(
        tensor_MK,
        block,
        FORMATS[fmt],
        power_of_two=power_of_two,
        stochastic=stochastic,
    )
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


class Predicted(NamedTuple):
    """Relative errors ‖result - truth‖ / ‖truth‖ of one GEMM. truth: the GEMM in float64. NaN if it is 0."""

    least: float
    expected: float
    bound: float


def predicted_errors(
    spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor, g_TN: Tensor
) -> dict[str, Predicted]:
    """The predicted errors for these operands, by GEMM: "output", "grad_input", "grad_weight".

    x_TK, g_TN: compute dtype. w_NK: any float dtype; it is cast to the compute dtype first, and the truth
    uses the cast weight. spec=None: a plain layer, whose only error is the rounding of the compute dtype.
    For `float8_delayed` the prediction is for the first step, without a history. For `int8_weight_only` pass
    the dequantized weight as w_NK: the layer computes like a plain layer with that weight. Cost for each of
    the three GEMMs: two float64 GEMMs, and two Gram matrices of the size of the contraction.
    """
    w_NK = w_NK.to(x_TK.dtype)
    operands = {"output": (x_TK, w_NK), "grad_input": (g_TN, w_NK), "grad_weight": (g_TN, x_TK)}
    back = {"grad_input", "grad_weight"} if spec is not None and spec.rotated else set[str]()
    return {
        gemm: _predict(
            *_operands(spec, gemm, a, b),
            x_TK.dtype,
            rotated_back=gemm in back and spec is not None and spec.is_low(gemm),
            # Few values of g may carry the noise. The square of a normal number exceeds its mean by so many
            # standard deviations as rarely as the number exceeds its own by 4 (seen: 5.8 in 3,000 draws).
            above=15 / math.sqrt(2) if gemm != "output" and spec and isinstance(spec.kind, Nvfp4) else 4.0,
        )
        for gemm, (a, b) in operands.items()
    }


def _predict(
    a_MK: Operand, b_KN: Operand, dtype: torch.dtype, *, rotated_back: bool, above: float
) -> Predicted:
    """above: number of standard deviations from the expectation to the bound."""
    known_MN = a_MK.mean @ (b_KN.value + b_KN.mean) + a_MK.value @ b_KN.mean
    from_a, spread_a = _from_noise(b_KN.t(), a_MK.t(), known_MN.t())
    from_b, spread_b = _from_noise(a_MK, b_KN, known_MN)
    from_both = float(a_MK.variance.sum(0) @ b_KN.variance.sum(1))
    noise = float(known_MN.square().sum()) + from_a + from_b + from_both
    truth_MN = a_MK.value @ b_KN.value
    signal = float(truth_MN.square().sum())
    if signal == 0:
        return Predicted(math.nan, math.nan, math.nan)
    num_products = a_MK.value.shape[1]
    rounding_MN = _of_sums(truth_MN, a_MK.value.square() @ b_KN.value.square(), num_products)
    if rotated_back:  # and rounded twice: the equal elements of a rotated row are rounded equally
        truth_MN, known_MN = rotate(truth_MN).double(), rotate(known_MN).double()
    rounding_MN += (1 + rotated_back) * _of_cast(truth_MN, dtype)
    rounding = float(rounding_MN.sum())
    # Of ‖known + rounding‖². It is added, not as a square: noise and rounding of one element may agree.
    spread_of_rounding = (2 * rounding_MN.square() + 4 * known_MN.square() * rounding_MN).sum()
    deviation = math.sqrt(spread_a + spread_b) + math.sqrt(float(spread_of_rounding))
    # A unit that flushes to zero loses up to `tiny` of each operand, product and sum, all with one sign.
    lost_MN = a_MK.value.abs().sum(1, keepdim=True) + b_KN.value.abs().sum(0) + num_products + 1
    lost = torch.finfo(torch.float32).tiny * float(lost_MN.norm())
    return Predicted(
        max(math.sqrt(max(noise - 4 * deviation, 0.0)) - lost, 0.0) / math.sqrt(signal),
        math.sqrt((noise + rounding) / signal),
        (math.sqrt(noise + rounding + above * deviation) + lost) / math.sqrt(signal),
    )


def _of_sums(truth_MN: Tensor, products_MN: Tensor, num_products: int) -> Tensor:
    """The variance of the rounding of sums in float32. products_MN: the sums of squared products.

    Each addition rounds a partial sum, by a step of at most eps times it. Its square is at most that of the
    result (products of one sign) plus the sum of squared products (of random signs).
    """
    eps = torch.finfo(torch.float32).eps
    return num_products * eps**2 / 12 * (truth_MN.square() + products_MN)


def _of_cast(truth_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """The variance of the rounding of results to `dtype`: a step is at most eps times the value, and not
    below the smallest number.
    """
    dtype_info = torch.finfo(dtype)
    step_MN = (dtype_info.eps * truth_MN.abs()).clamp(min=dtype_info.eps * dtype_info.tiny)
    return step_MN.square() / 12


def _from_noise(a_MK: Operand, b_KN: Operand, known_MN: Tensor) -> tuple[float, float]:
    """Mean of ‖a @ noise of b‖² and variance of ‖known + a @ noise of b‖²."""
    rows, which_K = torch.unique(torch.cat([b_KN.value, b_KN.variance], 1), dim=0, return_inverse=True)
    a_MU = torch.zeros(a_MK.value.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
    a_MU.index_add_(1, which_K, a_MK.value)  # a sum over rows that are equal and equally rounded
    variance_UN = rows[:, b_KN.value.shape[1] :]
    mean = a_MU.square().sum(0) @ variance_UN.sum(1)
    quadratic = 2 * (((a_MU.t() @ a_MU).square() @ variance_UN) * variance_UN).sum()
    linear = 4 * (variance_UN * (a_MU.t() @ known_MN).square()).sum()
    return float(mean), float(quadratic + linear)


@functools.singledispatch
def low_operands(kind: Kind, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    """The operands of a GEMM that is low, with the errors of their rounding. a, b: x and W of `output`, g and
    W of `grad_input`, g and x of `grad_weight`.
    """
    raise NotImplementedError(f"no noise model of {kind.name}: register one with low_operands")


@low_operands.register
def _(kind: Rowwise, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    if gemm == "output":
        return _by_row(spec, a), _by_row(spec, b).t()
    if gemm == "grad_input" and spec.grad_input == "folded":
        # The GEMM multiplies g * s by q = W / s. Rotating its result back changes no norm, and rounds once
        # more: two roundings of values that are spread evenly have less than the variance that is taken for
        # one, in which all values would be just above a power of two.
        s_N1 = _row_scales(spec, b)
        folded_TN = a.to(torch.float32) * s_N1.t()
        return _gradient(spec, folded_TN, (1, a.shape[1])), _by_row(spec, b).times(_inverse(s_N1))
    if gemm == "grad_input":
        w = _requantized(spec, b) if spec.grad_input == "requantized" else _by_column(spec, b)
        return _gradient(spec, a, (1, a.shape[1])), w
    if spec.grad_weight == "folded":  # the GEMM multiplies g * s by q = x / s
        s_T1 = _row_scales(spec, b)
        folded_TN = a.to(torch.float32) * s_T1
        return _gradient(spec, folded_TN, (a.shape[0], 1)).t(), _by_row(spec, b).times(_inverse(s_T1))
    return _gradient(spec, a, (a.shape[0], 1)).t(), _by_column(spec, b)


@low_operands.register
def _(kind: Tensorwise, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    b_noisy = rounded(b, (b.shape[0], b.shape[1]), spec.fmt, power_of_two=spec.power_of_two)
    if gemm == "output":
        return rounded(a, (a.shape[0], a.shape[1]), spec.fmt, power_of_two=spec.power_of_two), b_noisy.t()
    g = _gradient(spec, a, (a.shape[0], a.shape[1]))
    return g if gemm == "grad_input" else g.t(), b_noisy


@low_operands.register
def _(kind: Blockwise, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    along_rows, along_columns = (1, kind.size), (kind.size, 1)
    if gemm == "grad_weight":
        x = rounded(b, along_columns, spec.fmt, power_of_two=spec.power_of_two)
        return _gradient(spec, a, along_columns).t(), x
    # Square blocks serve `output` and `grad_input`. Other kinds quantize W again, along N.
    along_n = gemm == "grad_input" and kind.weight_block is None
    block = along_columns if along_n else weight_scale_block(kind, b)
    w = rounded(b, block, spec.fmt, power_of_two=spec.power_of_two)
    if gemm == "output":
        return rounded(a, along_rows, spec.fmt, power_of_two=spec.power_of_two), w.t()
    return _gradient(spec, a, along_rows), w


@low_operands.register
def _(kind: Int8WeightOnly, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    """b: the dequantized weight, by which `output` multiplies, so there is no error."""
    return exact(a), exact(b.t() if gemm == "output" else b)


@low_operands.register
def _(kind: Int4Weight, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    """W is rounded by groups of a row. A format of so few steps has a known error (see `rounded`)."""
    n, k = b.shape
    w_NGC = b.to(torch.float32).view(n, k // kind.weight_group, kind.weight_group)
    scale_NG1 = (w_NGC.abs().amax(2, keepdim=True) / 7).to(torch.bfloat16).to(torch.float64)
    scale_NG1 = torch.where(scale_NG1 == 0, 1.0, scale_NG1)
    rounded_NK = ((w_NGC.double() / scale_NG1).round() * scale_NG1).view(n, k).to(b.dtype)
    w = exact(b).plus(known(rounded_NK.double() - b.double()))
    return exact(a), w.t() if gemm == "output" else w


@low_operands.register
def _(kind: Bitnet, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    """W is -1, 0 or 1 times a scale: its error is known. x and g are rounded as by int8_rowcol."""
    if gemm == "grad_weight":
        rowwise: Operands = low_operands.dispatch(Rowwise)(kind, spec, gemm, a, b)
        return rowwise
    w, scale = _ternary(b)
    if gemm == "output":
        return _by_row(spec, a), w.t()
    folded_TN = a.to(torch.float32) * scale
    return _gradient(spec, folded_TN, (1, a.shape[1])), w.times(torch.full_like(b[:, :1], 1 / scale).double())


def _ternary(w_NK: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Operand, float]:
    """(W with the error of its three values, each rounded to `dtype`; their scale)."""
    w64 = w_NK.double()
    scale = 1 / float((1 / w64.abs().mean()).to(torch.bfloat16))
    rounded_NK = ((w64 / scale).round().clamp(-1, 1) * scale).to(dtype)
    return exact(w_NK).plus(known(rounded_NK.double() - w64)), scale


@low_operands.register
def _(kind: Nvfp4, spec: LinearSpec, gemm: str, a: Tensor, b: Tensor) -> Operands:
    if gemm == "grad_weight":
        g, x = numerics.rotate_nvfp4(a.t()), numerics.rotate_nvfp4(b.t())
        return _nvfp4(g, stochastic=spec.stochastic), _nvfp4(x).t()
    w = _nvfp4(b, square=True)
    return (_nvfp4(a), w.t()) if gemm == "output" else (_nvfp4(a, stochastic=spec.stochastic), w)


def _nvfp4(x_MK: Tensor, *, square: bool = False, stochastic: bool = False) -> Operand:
    """x in NVFP4, by its definition: with 8 magnitudes the error of each element is known (see `rounded`).
    stochastic: it is up with probability f, its distance from the lower magnitude in steps.
    """
    (m, k), rows = x_MK.shape, 16 if square else 1
    x = F.pad(x_MK.double(), (0, -k % 16, 0, -m % rows))
    largest = x.abs().amax()
    inverse, whole = (448 * 6 / largest).float(), (largest / (448 * 6)).float()
    x32 = x.float() * inverse  # as defined, in float32: a value may lie between two numbers
    amax = x32.unflatten(1, (-1, 16)).unflatten(0, (-1, rows)).abs().amax((1, 3))
    blocks = (amax / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    blocks = blocks.repeat_interleave(rows, 0).repeat_interleave(16, 1)
    scaled = torch.where(blocks > 0, x32 / blocks, 0.0).double()
    scale = blocks.double() * whole.double()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    magnitude = scaled.abs().clamp(max=6)
    # Of two equally near numbers the one with an even place in the list has an even significand.
    place = torch.searchsorted(numbers, magnitude).clamp(min=1)
    below, above = numbers[place - 1], numbers[place]
    fraction = (magnitude - below) / (above - below)
    if stochastic:
        mean = scaled.sign() * magnitude - scaled  # beyond 6
        variance = (above - below).square() * fraction * (1 - fraction)
    else:
        is_up = (fraction > 0.5) | ((fraction == 0.5) & (place % 2 == 0))
        mean, variance = scaled.sign() * torch.where(is_up, above, below) - scaled, torch.zeros_like(scaled)
    mean, variance = torch.where(scale > 0, scale * mean, -x), scale.square() * variance
    return Operand(*(each[:m] for each in (x, mean, variance)))


def weight_scale_block(kind: Kind, w_NK: Tensor) -> tuple[int, int]:
    """(rows, columns) of the scale blocks of W in `output`."""
    n, k = w_NK.shape
    if kind.row_scales:
        return 1, k
    if kind.one_scale:
        return n, k
    if kind.weight_group > 1:
        return 1, kind.weight_group
    size: int = kind.size  # type: ignore[attr-defined]
    return (1, size) if kind.weight_block is None else (size, size)


def _operands(spec: LinearSpec | None, gemm: str, a: Tensor, b: Tensor) -> Operands:
    """The operands of `gemm` with their errors; a and b as in `low_operands`."""
    if spec is not None and spec.is_low(gemm):
        return low_operands(spec.kind, spec, gemm, a, b)
    is_ternary = spec is not None and isinstance(spec.kind, Bitnet) and spec.output == "low"
    if gemm == "grad_weight" and is_ternary:  # by x as it was rounded for `output`
        return exact(a.t()), dequantized(b, (1, b.shape[1]), "int8", power_of_two=False)
    if gemm == "grad_weight":
        return exact(a.t()), exact(b)
    if is_ternary:
        return exact(a), _ternary(b, b.dtype)[0]
    if spec is None or not spec.high_uses_8_bit_weight:
        return exact(a), exact(b.t() if gemm == "output" else b)
    if isinstance(spec.kind, Nvfp4):
        w = _nvfp4(b, square=True)
        w = w.plus(known((b + w.mean).to(b.dtype).double() - b - w.mean))
        return exact(a), w.t() if gemm == "output" else w
    block = weight_scale_block(spec.kind, b)
    w = dequantized(b, block, spec.fmt, power_of_two=spec.power_of_two, rotated=spec.rotated)
    if gemm == "output":
        return exact(rotate(a) if spec.rotated else a), w.t()
    return exact(a), w


def _gradient(spec: LinearSpec, g_TN: Tensor, block: tuple[int, int]) -> Operand:
    return rounded(g_TN, block, spec.grad_fmt, power_of_two=spec.power_of_two, stochastic=spec.stochastic)


def _by_row(spec: LinearSpec, x_MK: Tensor) -> Operand:
    """x or W with one scale per row."""
    x_MK = rotate(x_MK) if spec.rotated else x_MK
    return rounded(x_MK, (1, x_MK.shape[1]), spec.fmt, power_of_two=spec.power_of_two)


def _by_column(spec: LinearSpec, x_MK: Tensor) -> Operand:
    """x or W with one scale per column."""
    return rounded(x_MK, (x_MK.shape[0], 1), spec.fmt, power_of_two=spec.power_of_two)


def _row_scales(spec: LinearSpec, x_MK: Tensor) -> Tensor:
    """The scales (M, 1) of x or W quantized by rows."""
    x_MK = rotate(x_MK) if spec.rotated else x_MK
    return numerics.quantize_rows(x_MK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1


def _inverse(scale_M1: Tensor) -> Tensor:
    """1 / scale, or 0 for a row of zeros: the factor of an operand whose row scales are folded into g."""
    return torch.where(scale_M1 > 0, 1 / scale_M1.to(torch.float64), 0.0)


def _requantized(spec: LinearSpec, w_NK: Tensor) -> Operand:
    """W with the errors of quantizing it by rows, dequantizing it and quantizing it by columns.

    The error of the first rounding is taken as noise. That of the second is computed: dequantized values lie
    on a grid, so they are not spread evenly between two 8-bit numbers, as noise assumes. If scales of rows
    and columns are similar, or all are powers of two, the second error is much less than a step.
    """
    fmt, power_of_two = FORMATS[spec.fmt], spec.power_of_two
    rows = numerics.dequantize(numerics.quantize_rows(w_NK, fmt, power_of_two=power_of_two), w_NK.dtype)
    again = numerics.quantize_columns(rows, fmt, power_of_two=power_of_two)
    twice = again.q_MK.to(torch.float64) * again.scale_1K.to(torch.float64)
    error = twice - rows.to(torch.float64)
    # The quantizer itself gives this error, and the error widens the bound that tests the quantizer. So that
    # a faulty quantizer does not pass, its error may be at most half a step, as of rounding to nearest.
    step = quantization_step(rows, (w_NK.shape[0], 1), fmt, power_of_two=power_of_two)
    # Of a step, x * (1 / scale) is off by up to 127 * 2**-23 (two roundings). A NaN or inf in W is not the
    # quantizer's fault; it makes the predicted noise NaN.
    holds = (error.abs() <= step / 2 + step * 127 * 2**-23).all() or not w_NK.isfinite().all()
    assert holds, "the second rounding is off by more than half a step"
    cast = cast_error(w_NK, (1, w_NK.shape[1]), spec.fmt, power_of_two=power_of_two)
    return _by_row(spec, w_NK).plus(cast).plus(known(error))
