"""How large the error of each of the three GEMMs must be, from the formats alone.

Rounding an element to a step d adds independent noise of mean 0 and variance d**2 / 12
(lptune/numerics/error.py). A GEMM `c = a @ b` of two rounded operands is then off by

    E ‖c' - c‖² = sum over k of  va_k * B_k  +  A_k * vb_k  +  va_k * vb_k

where A_k and va_k are the sums of squares and of variances over a's column k, B_k and vb_k those over b's row
k. For operands without structure this is "the relative errors of both, added as variances"; with the
weighting by k it also holds where channels or tokens differ by orders of magnitude, as in real activations.

How far a single draw strays from that expectation follows from the same noise: `‖c' - c‖²` is a quadratic
form in it, whose variance is at most 2 * sum over k, l of v_k G_kl**2 v_l for each row of a, G being the Gram
matrix of b's rows (equal for Gaussian noise; uniform noise varies less). The bound is four such deviations
away.

A folded operand is looked at as it is multiplied: its noise is that of g * s, and W / s carries W's.

A result much better than predicted says as clearly as one much worse that the layer did not compute what its
spec says; `least` is four deviations below, without what the compute dtype adds.

Where most values lie within a step or two of zero (INT8 beside a large outlier that shares their scale),
rounding is no noise any more but a function of the values, and their distribution moves the error: by 6 % of
the expectation for Gaussian values of half a step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.linear.spec import LinearSpec
from lptune.numerics import (
    FORMATS,
    MX_BLOCK,
    dequantize,
    quantization_step,
    quantize_rows,
    rounding_variance,
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
    alone. `float8_delayed` is taken at its first step, when there is no history. Costs a float64 GEMM and two
    Gram matrices of the contraction for each of the three.
    """
    w_NK = w_NK.to(x_TK.dtype)
    operands = (
        ("output", _output(spec, x_TK, w_NK)),
        ("grad_input", _grad_input(spec, g_TN, w_NK)),
        ("grad_weight", _grad_weight(spec, g_TN, x_TK)),
    )
    return {gemm: _predict(a, b, x_TK.dtype) for gemm, (a, b) in operands}


class _Operand:
    """An operand of a GEMM and the variance of what was done to it, both float64, as it is multiplied."""

    def __init__(self, value: Tensor, variance: Tensor | None = None) -> None:
        self.value = value.to(torch.float64)
        self.variance = torch.zeros_like(self.value) if variance is None else variance

    def t(self) -> "_Operand":
        return _Operand(self.value.t(), self.variance.t())


def _predict(a_MK: _Operand, b_KN: _Operand, dtype: torch.dtype) -> Predicted:
    va_K, vb_K = a_MK.variance.sum(0), b_KN.variance.sum(1)
    a_K, b_K = a_MK.value.square().sum(0), b_KN.value.square().sum(1)
    noise = float((va_K * b_K + a_K * vb_K + va_K * vb_K).sum())
    spread = 4 * math.sqrt(_variance_of_square(a_MK, b_KN.t()) + _variance_of_square(b_KN.t(), a_MK))
    signal = float((a_MK.value @ b_KN.value).square().sum())
    if signal == 0:
        return Predicted(math.nan, math.nan, math.nan)
    # What a float32 sum of K products adds: each addition rounds a partial sum, on average half of the whole.
    sums = float(a_K @ b_K) * a_MK.value.shape[1] / 2 * _rounding(torch.float32)
    rounding = sums / signal + _rounding(dtype)
    return Predicted(
        math.sqrt(max(noise - spread, 0.0) / signal),
        math.sqrt(noise / signal + rounding),
        math.sqrt((noise + spread) / signal + rounding),
    )


def _variance_of_square(a_MK: _Operand, b_NK: _Operand) -> float:
    """Variance of ‖noise of a @ b.T‖²."""
    gram_KK = b_NK.value.t() @ b_NK.value
    return 2 * float(((a_MK.variance @ gram_KK.square()) * a_MK.variance).sum())


def _rounding(dtype: torch.dtype) -> float:
    """Largest relative variance of rounding once to a floating-point dtype: a step is at most eps * value."""
    return float(torch.finfo(dtype).eps) ** 2 / 12


def _output(spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None or spec.output == "high":
        return _Operand(x_TK), _Operand(w_NK.t())
    how = {"mx": _ROW, "blockwise": _ROW, "rowwise": _ROW}.get(spec.scaling, _TENSOR)
    return _quantized(spec, x_TK, how, spec.fmt), _weight(spec, w_NK).t()


def _grad_input(spec: LinearSpec | None, g_TN: Tensor, w_NK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None:
        return _Operand(g_TN), _Operand(w_NK)
    if spec.grad_input == "high":
        w = _weight(spec, w_NK)  # the dequantized weight of `output`, rounded to the compute dtype
        cast = w.value.square() * _rounding_of_dequantized(spec, g_TN.dtype)
        return _Operand(g_TN), _Operand(w.value, w.variance + cast)
    if spec.grad_input == "folded":
        s_N1 = quantize_rows(w_NK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1
        w = _weight(spec, w_NK)
        folded = _quantized(spec, g_TN.to(torch.float32) * s_N1.t(), _ROW, spec.grad_fmt)
        return folded, _divided(w, s_N1)
    if spec.grad_input == "requantized":
        return _quantized(spec, g_TN, _ROW, spec.grad_fmt), _requantized(spec, w_NK)
    how = {"column": (_ROW, _COLUMN), "tensor": (_TENSOR, _TENSOR), "block": (_ROW, _COLUMN)}[spec.grad_input]
    w = _weight(spec, w_NK) if spec.scaling == "blockwise" else _quantized(spec, w_NK, how[1], spec.fmt)
    return _quantized(spec, g_TN, how[0], spec.grad_fmt), w


def _grad_weight(spec: LinearSpec | None, g_TN: Tensor, x_TK: Tensor) -> tuple[_Operand, _Operand]:
    if spec is None or spec.grad_weight == "high":
        return _Operand(g_TN.t()), _Operand(x_TK)
    if spec.grad_weight == "folded":
        s_T1 = quantize_rows(x_TK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1
        folded = _quantized(spec, g_TN.to(torch.float32) * s_T1, _COLUMN, spec.grad_fmt)
        return folded.t(), _divided(_quantized(spec, x_TK, _ROW, spec.fmt), s_T1)
    how = _TENSOR if spec.grad_weight == "tensor" else _COLUMN
    return _quantized(spec, g_TN, how, spec.grad_fmt).t(), _quantized(spec, x_TK, how, spec.fmt)


def _weight(spec: LinearSpec, w_NK: Tensor) -> _Operand:
    """W as `output` quantizes it."""
    if spec.scaling == "blockwise":
        variance = rounding_variance(w_NK, (_BLOCK, _BLOCK), FORMATS[spec.fmt])
        return _Operand(w_NK, variance)
    how = _ROW if spec.scaling in ("rowwise", "mx") else _TENSOR
    return _quantized(spec, w_NK, how, spec.fmt)


def _quantized(spec: LinearSpec, tensor_MK: Tensor, how: str, fmt: str) -> _Operand:
    """One scale per row, column or tensor, or per block along a row or column where the kind has blocks."""
    block = _block(spec, tensor_MK, how)
    variance = rounding_variance(tensor_MK, block, FORMATS[fmt], power_of_two=spec.power_of_two)
    return _Operand(tensor_MK, variance)


def _block(spec: LinearSpec, tensor_MK: Tensor, how: str) -> tuple[int, int]:
    m, k = tensor_MK.shape
    along = {"mx": MX_BLOCK, "blockwise": _BLOCK}.get(spec.scaling)
    return {_ROW: (1, along or k), _COLUMN: (along or m, 1), _TENSOR: (m, k)}[how]


def _divided(operand: _Operand, scale_M1: Tensor) -> _Operand:
    """`operand / scale`, 0 where a row is zero: what remains of a row after folding its scale away."""
    inverse_M1 = torch.where(scale_M1 > 0, 1 / scale_M1.to(torch.float64), 0.0)
    return _Operand(operand.value * inverse_M1, operand.variance * inverse_M1.square())


def _requantized(spec: LinearSpec, w_NK: Tensor) -> _Operand:
    """W quantized by row, dequantized and quantized by column: the noise of both roundings."""
    fmt = FORMATS[spec.fmt]
    w = _quantized(spec, w_NK, _ROW, spec.fmt)
    rows = dequantize(quantize_rows(w_NK, fmt, power_of_two=spec.power_of_two), w_NK.dtype)
    if not spec.power_of_two:
        cast = w.value.square() * _rounding_of_dequantized(spec, w_NK.dtype)
        return _Operand(w.value, w.variance + cast + _quantized(spec, rows, _COLUMN, spec.fmt).variance)
    # Scales that are powers of two make nested grids: a number of the finer one lies on the coarser or evenly
    # between its points. With m points to a step the mean square is step**2 / 12 * (1 + 2 / m**2), for m = 1
    # it is 0.
    first = quantization_step(w_NK, _block(spec, w_NK, _ROW), fmt, power_of_two=True)
    second = quantization_step(rows, _block(spec, rows, _COLUMN), fmt, power_of_two=True)
    nested = second.square() / 12 * (1 + 2 * (first / second).square())
    again = torch.where((second > first) & (rows != 0), nested, 0.0)
    return _Operand(w.value, w.variance + again)


def _rounding_of_dequantized(spec: LinearSpec, dtype: torch.dtype) -> float:
    """Relative variance that dequantizing to `dtype` adds; a float8 number times a power of two is exact."""
    return 0.0 if spec.power_of_two else _rounding(dtype)
