"""Predicts the error of each of the three GEMMs from the formats alone.

Rounding an element to multiples of a step d adds independent noise of mean 0 and variance d**2 / 12. Near
zero the error is not noise: it is known (lptune/numerics/error.py). For a GEMM `c = a @ b` of two rounded
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

The file of each kind in lptune/linear/kinds/ says which operands it multiplies and how it rounds them. A
folded operand is described as it is multiplied: the noise of g * s, and the noise of W divided by s.

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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.noise import Operand, Operands, dequantized, exact
from lptune.numerics import rotate


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
    operands = (
        ("output", _output(spec, x_TK, w_NK)),
        ("grad_input", _grad_input(spec, g_TN, w_NK)),
        ("grad_weight", _grad_weight(spec, g_TN, x_TK)),
    )
    back = {"grad_input", "grad_weight"} if spec is not None and spec.rotated else set[str]()
    return {
        gemm: _predict(a, b, x_TK.dtype, rotated_back=gemm in back and spec is not None and spec.is_low(gemm))
        for gemm, (a, b) in operands
    }


def _predict(a_MK: Operand, b_KN: Operand, dtype: torch.dtype, *, rotated_back: bool) -> Predicted:
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
    spread = 4 * (math.sqrt(spread_a + spread_b) + math.sqrt(float(spread_of_rounding)))
    # A unit that flushes to zero loses up to `tiny` of each operand, product and sum, all with one sign.
    lost_MN = a_MK.value.abs().sum(1, keepdim=True) + b_KN.value.abs().sum(0) + num_products + 1
    lost = torch.finfo(torch.float32).tiny * float(lost_MN.norm())
    return Predicted(
        max(math.sqrt(max(noise - spread, 0.0)) - lost, 0.0) / math.sqrt(signal),
        math.sqrt((noise + rounding) / signal),
        (math.sqrt(noise + rounding + spread) + lost) / math.sqrt(signal),
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


def _output(spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor) -> Operands:
    if spec is None or (spec.output == "high" and not spec.high_uses_8_bit_weight):
        return exact(x_TK), exact(w_NK.t())
    if spec.output == "high":
        x_TK = rotate(x_TK) if spec.rotated else x_TK
        return exact(x_TK), _dequantized_weight(spec, w_NK).t()
    return kind_of(spec).noisy_output(spec, x_TK, w_NK)


def _grad_input(spec: LinearSpec | None, g_TN: Tensor, w_NK: Tensor) -> Operands:
    if spec is None or (spec.grad_input == "high" and not spec.high_uses_8_bit_weight):
        return exact(g_TN), exact(w_NK)
    if spec.grad_input == "high":
        return exact(g_TN), _dequantized_weight(spec, w_NK)
    return kind_of(spec).noisy_grad_input(spec, g_TN, w_NK)


def _grad_weight(spec: LinearSpec | None, g_TN: Tensor, x_TK: Tensor) -> Operands:
    if spec is None or spec.grad_weight == "high":
        return exact(g_TN.t()), exact(x_TK)
    return kind_of(spec).noisy_grad_weight(spec, g_TN, x_TK)


def _dequantized_weight(spec: LinearSpec, w_NK: Tensor) -> Operand:
    """The weight of a GEMM that is `high`, where `spec.high_uses_8_bit_weight`; rotated where x is."""
    block = kind_of(spec).weight_scale_block(*w_NK.shape)
    return dequantized(w_NK, block, spec.fmt, power_of_two=spec.power_of_two, rotated=spec.rotated)
