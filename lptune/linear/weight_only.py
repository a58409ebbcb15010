"""`int8_weight_only`: W is stored in INT8 by rows, and all three GEMMs run in the compute dtype.

    output      = x @ (q * s).T     the weight is dequantized on its way into the GEMM
    grad_input  = g @ (q * s)
    grad_weight = g.T @ x           high; the gradient is a plain tensor

The other kinds keep a float32 master weight and quantize a copy of it in every step. Here q and s are the
weight: 1 byte for a parameter instead of 4, and no rounding in forward or backward beyond the storage itself.
What that costs is in the update. AdamW changes a weight by about the learning rate, 1e-5, and a step of q is
about amax / 127, 1e-3: rounded to nearest, nothing would ever change. The update is therefore rounded
stochastically, up with the probability of the distance from below, and right in expectation
(training/optimizer.py). Its noise is that of a random walk of single steps; the kind is for models that
otherwise do not fit.
"""

from torch import Tensor

from lptune.kernels import GRAD_INPUT, OUTPUT, weight_only_mm
from lptune.linear.int8_weight import Int8Weight
from lptune.linear.spec import LinearSpec


def forward(spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(`x @ w.T` in x's dtype, what `backward` needs of x). w_NK: an Int8Weight."""
    return _mm(x_TK, w_NK, True, layer, OUTPUT), (x_TK,)


def backward(
    spec: LinearSpec,
    g_TN: Tensor,
    w_NK: Tensor,
    saved: tuple[Tensor, ...],
    layer: Tensor,
    needs_grad_input: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input, grad_weight) in g's dtype; None where not needed. w_NK: an Int8Weight."""
    (x_TK,) = saved
    gx_TK = _mm(g_TN, w_NK, False, layer, GRAD_INPUT) if needs_grad_input else None
    return gx_TK, g_TN.t() @ x_TK if needs_grad_weight else None


def _mm(a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
    assert isinstance(w_NK, Int8Weight), type(w_NK)
    return weight_only_mm(a_TM, w_NK.q_NK, w_NK.scale_N1, transposed, layer, gemm)
