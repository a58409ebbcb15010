"""What kinds have in common that multiply in the compute dtype, by a weight of fewer bits.

    output      = x @ W'.T     W' = the weight as the kind has it; the op that multiplies makes it
    grad_input  = g @ W'
    grad_weight = g.T @ x      high

Shapes: T tokens, K in_features, N out_features.
"""

from abc import abstractmethod

from torch import Tensor

from lptune.kernels import GRAD_INPUT, OUTPUT, Quantized
from lptune.linear.kind import Kind, LinearSpec, Needs, Saved


class WeightOnly(Kind):
    """A kind that quantizes neither x nor g. It has no 8-bit GEMM."""

    operations = ()

    @abstractmethod
    def multiply(self, a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
        """`a @ w'.T` if transposed (a is x, M is K), else `a @ w'` (a is g, M is N); counted as `gemm`."""

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """See Kind. What it saves is x, for grad_weight."""
        assert quantized_x is None, "x is multiplied in compute dtype"
        if spec.output == "high":  # fell back
            return x_TK @ w_NK.t(), (x_TK,)
        return self.multiply(x_TK, w_NK, True, layer, OUTPUT), (x_TK,)

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        """See Kind. grad_weight is the gradient of W', passed to W as it is."""
        gx_TK = None
        if needs.input:
            is_high = spec.grad_input == "high"
            gx_TK = g_TN @ w_NK if is_high else self.multiply(g_TN, w_NK, False, layer, GRAD_INPUT)
        return gx_TK, g_TN.t() @ saved[0] if needs.weight else None

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.fmt} weight"
