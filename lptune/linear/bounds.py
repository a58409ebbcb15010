"""How large the error of each of the three GEMMs must be, from the formats alone.

Rounding an element to a step d adds independent noise of mean 0 and variance d**2 / 12; near zero it is no
noise but a known error (lptune/numerics/error.py). A GEMM `c = a @ b` of two rounded operands is then off by

    E ‖c' - c‖² = ‖m‖² + sum over k of  va_k * B_k  +  A_k * vb_k  +  va_k * vb_k

where m is what the known errors make, A_k and va_k are the sums of squares and of variances over a's column
k, B_k and vb_k those over b's row k. For operands without structure this is "the relative errors of both,
added as variances"; with the weighting by k it also holds where channels or tokens differ by orders of
magnitude, as in real activations.

How far a single draw strays from that expectation follows from the same noise: `‖c' - c‖²` is a quadratic
form in it, whose variance is at most 2 * sum over k, l of v_k G_kl**2 v_l for each row of a, G being the Gram
matrix of b's rows (equal for Gaussian noise; uniform noise varies less), and the known errors add
4 * sum of v * (m @ b.T)**2. The bound is four such deviations away.

A folded operand is looked at as it is multiplied: its noise is that of g * s, and W / s carries W's.

A result much better than predicted says as clearly as one much worse that the layer did not compute what its
spec says; `least` is four deviations below, without what the compute dtype adds.

Independence is an assumption, and what repeats is rounded alike. Where whole rows do, as the same token's do
before the first attention, they are counted as one: without that grad_weight of the first q, k and v of a
trained Llama is up to 1.5 times the bound. (Stochastic rounding would round them independently.) Values that
lie on a grid as coarse as the format's own err less than predicted. Where single values repeat, errors need
not average out: the -1 + p that every token's gradient holds at its label, in the head of a model, or all the
other p while the model knows nothing yet. What half a step allows at most is sqrt(3) times the noise assumed
here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.linear.spec import LinearSpec
from lptune.numerics import (
    FORMATS,
    MX_BLOCK,
    Noise,
    dequantize,
    dequantize_blocks,
    expand_blocks,
    quantization_step,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    rounding_noise,
)

_BLOCK = 128
_ROW, _COLUMN, _TENSOR = "row", "column", "tensor"


class Predicted(NamedTuple):
    """‖result - truth‖ / ‖truth‖ of one GEMM, truth being float64's; NaN where the truth is zero."""

    least: float
    expected: float
    bound: float


def predicted_errors(
    spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor, g_TN: Tensor
) -> dict[str, Predicted]:
    """What to expect of output, grad_input and grad_weight, the keys, for these very operands.

    x, g: compute dtype. w_NK: any float dtype; it is cast to the compute dtype first, like everywhere, and
    the truth is that of the cast weight. spec None: a plain layer, off by the rounding of the compute dtype
    alone. `float8_delayed` is taken at its first step, when there is no history. `int8_weight_only` computes
    like a plain layer with the dequantized weight, which is w_NK here. Costs a float64 GEMM and two Gram
    matrices of the contraction for each of the three.
    """
    w_NK = w_NK.to(x_TK.dtype)
    if spec is not None and not spec.multiplies_in_8_bits:
        spec = None
    operands = (
        ("output", _output(spec, x_TK, w_NK)),
        ("grad_input", _grad_input(spec, g_TN, w_NK)),
        ("grad_weight", _grad_weight(spec, g_TN, x_TK)),
    )
    return {gemm: _predict(a, b, x_TK.dtype) for gemm, (a, b) in operands}


class _Operand(NamedTuple):
    """An operand of a GEMM and what was done to it, all float64, as it is multiplied."""

    value: Tensor
    mean: Tensor
    """Known errors."""
    variance: Tensor
    """Of unknown ones."""

    def t(self) -> "_Operand":
        return _Operand(self.value.t(), self.mean.t(), self.variance.t())

    def plus(self, other: Noise) -> "_Operand":
        """With the errors of another rounding added."""
        return _Operand(self.value, self.mean + other.mean, self.variance + other.variance)

    def times(self, factor: Tensor) -> "_Operand":
        return _Operand(self.value * factor, self.mean * factor, self.variance * factor.square())


def _exact(value: Tensor) -> _Operand:
    value64 = value.to(torch.float64)
    return _Operand(value64, torch.zeros_like(value64), torch.zeros_like(value64))


def _predict(a_MK: _Operand, b_KN: _Operand, dtype: torch.dtype) -> Predicted:
    known_MN = a_MK.mean @ (b_KN.value + b_KN.mean) + a_MK.value @ b_KN.mean
    from_a, spread_a = _from_noise(b_KN.t(), a_MK.t(), known_MN.t())
    from_b, spread_b = _from_noise(a_MK, b_KN, known_MN)
    from_both = float(a_MK.variance.sum(0) @ b_KN.variance.sum(1))
    noise = float(known_MN.square().sum()) + from_a + from_b + from_both
    spread = 4 * math.sqrt(spread_a + spread_b)
    signal = float((a_MK.value @ b_KN.value).square().sum())
    if signal == 0:
        return Predicted(math.nan, math.nan, math.nan)
    # What a float32 sum of K products adds: each addition rounds a partial sum, on average half of the whole.
    products = float(a_MK.value.square().sum(0) @ b_KN.value.square().sum(1))
    sums = products * a_MK.value.shape[1] / 2 * _rounding(torch.float32)
    rounding = sums / signal + _rounding(dtype)
    return Predicted(
        math.sqrt(max(noise - spread, 0.0) / signal),
        math.sqrt(noise / signal + rounding),
        math.sqrt((noise + spread) / signal + rounding),
    )


def _from_noise(a_MK: _Operand, b_KN: _Operand, known_MN: Tensor) -> tuple[float, float]:
    """Mean of ‖a @ noise of b‖² and variance of ‖known + a @ noise of b‖²."""
    rows, which_K = torch.unique(torch.cat([b_KN.value, b_KN.variance], 1), dim=0, return_inverse=True)
    a_MU = torch.zeros(a_MK.value.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
    a_MU.index_add_(1, which_K, a_MK.value)  # a sum over rows that are equal and equally rounded
    variance_UN = rows[:, b_KN.value.shape[1] :]
    mean = a_MU.square().sum(0) @ variance_UN.sum(1)
    quadratic = 2 * (((a_MU.t() @ a_MU).square() @ variance_UN) * variance_UN).sum()
    linear = 4 * (variance_UN * (a_MU.t() @ known_MN).square()).sum()
    return float(mean), float(quadratic + linear)


def _rounding(dtype: torch.dtype) -> float:
    """Largest relative variance of rounding once to a floating-point dtype: a step is at most eps * value."""
    return float(torch.finfo(dtype).eps) ** 2 / 12


def _output(spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None or (spec.output == "high" and not spec.high_uses_8_bit_weight):
        return _exact(x_TK), _exact(w_NK.t())
    if spec.output == "high":
        return _exact(x_TK), _weight(spec, w_NK).plus(_cast(spec, w_NK)).t()
    how = {"mx": _ROW, "blockwise": _ROW, "rowwise": _ROW}.get(spec.scaling, _TENSOR)
    return _quantized(spec, x_TK, how, spec.fmt), _weight(spec, w_NK).t()


def _grad_input(spec: LinearSpec | None, g_TN: Tensor, w_NK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None:
        return _exact(g_TN), _exact(w_NK)
    if spec.grad_input == "high" and not spec.high_uses_8_bit_weight:
        return _exact(g_TN), _exact(w_NK)
    if spec.grad_input == "high":
        # The dequantized weight of `output`, rounded to the compute dtype.
        return _exact(g_TN), _weight(spec, w_NK).plus(_cast(spec, w_NK))
    if spec.grad_input == "folded":
        s_N1 = quantize_rows(w_NK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1
        folded = _gradient(spec, g_TN.to(torch.float32) * s_N1.t(), _ROW)
        return folded, _weight(spec, w_NK).times(_inverse(s_N1))
    if spec.grad_input == "requantized":
        return _gradient(spec, g_TN, _ROW), _requantized(spec, w_NK)
    how = {"column": (_ROW, _COLUMN), "tensor": (_TENSOR, _TENSOR), "block": (_ROW, _COLUMN)}[spec.grad_input]
    w = _weight(spec, w_NK) if spec.scaling == "blockwise" else _quantized(spec, w_NK, how[1], spec.fmt)
    return _gradient(spec, g_TN, how[0]), w


def _grad_weight(spec: LinearSpec | None, g_TN: Tensor, x_TK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None or spec.grad_weight == "high":
        return _exact(g_TN.t()), _exact(x_TK)
    if spec.grad_weight == "folded":
        s_T1 = quantize_rows(x_TK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1
        folded = _gradient(spec, g_TN.to(torch.float32) * s_T1, _COLUMN)
        return folded.t(), _quantized(spec, x_TK, _ROW, spec.fmt).times(_inverse(s_T1))
    how = _TENSOR if spec.grad_weight == "tensor" else _COLUMN
    return _gradient(spec, g_TN, how).t(), _quantized(spec, x_TK, how, spec.fmt)


def _weight(spec: LinearSpec, w_NK: Tensor) -> _Operand:
    """W as `output` quantizes it."""
    noise = rounding_noise(w_NK, _weight_block(spec, w_NK), FORMATS[spec.fmt], power_of_two=spec.power_of_two)
    return _exact(w_NK).plus(noise)


def _weight_block(spec: LinearSpec, w_NK: Tensor) -> tuple[int, int]:
    if spec.scaling == "blockwise":
        return _BLOCK, _BLOCK
    return _block(spec, w_NK, _ROW if spec.scaling in ("rowwise", "mx") else _TENSOR)


def _gradient(spec: LinearSpec, g_TN: Tensor, how: str) -> _Operand:
    return _quantized(spec, g_TN, how, spec.grad_fmt, stochastic=spec.stochastic)


def _quantized(spec: LinearSpec, tensor_MK: Tensor, how: str, fmt: str, stochastic: bool = False) -> _Operand:
    """One scale per row, column or tensor, or per block along a row or column where the kind has blocks."""
    block = _block(spec, tensor_MK, how)
    noise = rounding_noise(
        tensor_MK, block, FORMATS[fmt], power_of_two=spec.power_of_two, stochastic=stochastic
    )
    return _exact(tensor_MK).plus(noise)


def _block(spec: LinearSpec, tensor_MK: Tensor, how: str) -> tuple[int, int]:
    m, k = tensor_MK.shape
    along = {"mx": MX_BLOCK, "blockwise": _BLOCK}.get(spec.scaling)
    return {_ROW: (1, along or k), _COLUMN: (along or m, 1), _TENSOR: (m, k)}[how]


def _inverse(scale_M1: Tensor) -> Tensor:
    """1 / scale, 0 where a row is zero: what a row is multiplied with when its scale is folded away."""
    return torch.where(scale_M1 > 0, 1 / scale_M1.to(torch.float64), 0.0)


def _requantized(spec: LinearSpec, w_NK: Tensor) -> _Operand:
    """W quantized by row, dequantized and quantized by column.

    The first rounding is noise. The second is a known error: it starts from 8-bit values and scales, and
    where scales of rows and columns are alike, or both powers of two, it rounds much less than a step.
    """
    fmt, w = FORMATS[spec.fmt], _weight(spec, w_NK)
    rows = dequantize(quantize_rows(w_NK, fmt, power_of_two=spec.power_of_two), w_NK.dtype)
    again = quantize_columns(rows, fmt, power_of_two=spec.power_of_two)
    twice = again.q_MK.to(torch.float64) * again.scale_1K.to(torch.float64)
    error = twice - rows.to(torch.float64)
    # Known, and yet no more than the format allows: a quantizer that is off must not widen its own bound.
    step = quantization_step(rows, _block(spec, rows, _COLUMN), fmt, power_of_two=spec.power_of_two)
    assert (error.abs() <= step / 2 * (1 + 1e-5)).all(), "the second rounding is off by more than half a step"
    return w.plus(_cast(spec, w_NK)).plus(_known(error))


def _cast(spec: LinearSpec, w_NK: Tensor) -> Noise:
    """What rounding the dequantized W to its dtype adds. No noise but a known error: the 8-bit values and the
    scales are those of this very W. In bfloat16 there is none where scales are powers of two.
    """
    block = _weight_block(spec, w_NK)
    quantized = quantize_blocks(w_NK, block, FORMATS[spec.fmt], power_of_two=spec.power_of_two)
    q_NK, scale_NK = quantized.q_MK, expand_blocks(quantized.scale, block, (w_NK.shape[0], w_NK.shape[1]))
    exact = q_NK.to(torch.float64) * scale_NK.to(torch.float64)
    return _known(dequantize_blocks(quantized, block, w_NK.dtype).to(torch.float64) - exact)


def _known(mean: Tensor) -> Noise:
    """An error that is known element by element."""
    return Noise(mean, torch.zeros_like(mean))
