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

Which operands a kind multiplies, and how they are rounded, stands in its file in lptune/linear/kinds/. A
folded operand is looked at as it is multiplied: its noise is that of g * s, and W / s carries W's.

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

from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.noise import Operand, Operands, dequantized, exact


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
    operands = (
        ("output", _output(spec, x_TK, w_NK)),
        ("grad_input", _grad_input(spec, g_TN, w_NK)),
        ("grad_weight", _grad_weight(spec, g_TN, x_TK)),
    )
    return {gemm: _predict(a, b, x_TK.dtype) for gemm, (a, b) in operands}


def _predict(a_MK: Operand, b_KN: Operand, dtype: torch.dtype) -> Predicted:
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


def _rounding(dtype: torch.dtype) -> float:
    """Largest relative variance of rounding once to a floating-point dtype: a step is at most eps * value."""
    return float(torch.finfo(dtype).eps) ** 2 / 12


def _output(spec: LinearSpec | None, x_TK: Tensor, w_NK: Tensor) -> Operands:
    if spec is None or (spec.output == "high" and not spec.high_uses_8_bit_weight):
        return exact(x_TK), exact(w_NK.t())
    if spec.output == "high":
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
    """By which a GEMM in compute dtype multiplies where `output` is in 8 bits."""
    block = kind_of(spec).weight_scale_block(*w_NK.shape)
    return dequantized(w_NK, block, spec.fmt, power_of_two=spec.power_of_two)
