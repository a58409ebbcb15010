"""`int8_weight_only`: W is stored in INT8 by rows, and all three GEMMs run in the compute dtype.

    output      = x @ (q * s).T     the op dequantizes the weight
    grad_input  = g @ (q * s)
    grad_weight = g.T @ x           high; the gradient is an ordinary tensor

The other kinds keep a float32 master weight and quantize a copy of it in every step. Here q and s are the
weight: 1 byte per parameter instead of 4, and forward and backward round nothing further.

The cost is in the update. AdamW changes a weight by about the learning rate, 1e-5. The rounding step of q is
about amax / 127, 1e-3, so rounding to nearest would undo every update. The update is therefore rounded
stochastically: up with a probability equal to the distance from the value below, in units of the step, which
is right in expectation (training/int8_adamw.py). Its noise is a random walk of single rounding steps. Use
this kind for models that otherwise do not fit.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.config import KindKeys
from lptune.kernels import GRAD_INPUT, OUTPUT, weight_only_mm
from lptune.linear.kind import Kind, LinearSpec
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.noise import Operands, exact
from lptune.linear.weights.int8_weight import Int8Weight, dequantized, quantized, row_scales


class Int8WeightLinear(LowPrecisionLinear):
    """The layer of `int8_weight_only`: its parameter is an Int8Weight, still the same object and name.

    The state dict has the dequantized values, which any other layer can load, and the scales
    (`weight_scale`). Scales cannot be recomputed exactly from the values: the largest value of a row is
    127 * s, and 127 * s / 127 differs from s for one scale in a hundred. Loading a state dict without scales
    rounds its values to nearest.
    """

    _SCALE = "weight_scale"

    @property
    def weight_scale(self) -> Tensor:
        """The scales, (N, 1) float32. Some tools expect every entry of a state dict to be an attribute."""
        return row_scales(self.weight)

    def _adopt_weight(self) -> None:
        old = self.weight
        weight = nn.Parameter(Int8Weight.from_float(old.detach()), requires_grad=old.requires_grad)
        # The parameter stays the same object, so an optimizer that was made before still updates it.
        torch.utils.swap_tensors(old, weight)

    def release(self) -> None:
        """Undoes `adopt`: the parameter becomes a float tensor with the dequantized values."""
        if isinstance(self.weight, DTensor):
            super().release()  # raises the UserError for a sharded layer
        weight = nn.Parameter(dequantized(self.weight), requires_grad=self.weight.requires_grad)
        torch.utils.swap_tensors(self.weight, weight)
        super().release()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = dequantized(self.weight)
        destination[prefix + self._SCALE] = self.weight_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        scale_N1, w_NK = state_dict.pop(prefix + self._SCALE, None), state_dict.get(f"{prefix}weight")
        if w_NK is not None and w_NK.shape == self.weight.shape:
            state_dict[f"{prefix}weight"] = quantized(w_NK, scale_N1, self.weight)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Int8WeightOnly(Kind):
    """INT8 storage of W. All GEMMs multiply by the stored values, so no option and no predicted noise."""

    name = "int8_weight_only"
    keys = KindKeys(
        ("dequantized",), ("high",), ("int8",), can_gather_low=True, output=("low",), stores_low=True
    )
    fmt = "int8"
    operations = ()
    row_scales = True
    layer_class = Int8WeightLinear

    def forward(
        self,
        spec: LinearSpec,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Kind. w_NK: an Int8Weight."""
        assert quantized_x is None, "x is multiplied in compute dtype"
        return _mm(x_TK, w_NK, True, layer, OUTPUT), (x_TK,)

    def backward(
        self,
        spec: LinearSpec,
        g_TN: Tensor,
        w_NK: Tensor,
        saved: tuple[Tensor, ...],
        layer: Tensor,
        needs_grad_input: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See Kind. w_NK: an Int8Weight."""
        gx_TK = _mm(g_TN, w_NK, False, layer, GRAD_INPUT) if needs_grad_input else None
        return gx_TK, g_TN.t() @ saved[0] if needs_grad_weight else None

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.fmt} weight"

    def describe_gather(self, spec: LinearSpec) -> str:
        return spec.fmt

    def weight_scale_block(self, n: int, k: int) -> tuple[int, int]:
        return 1, k

    def noisy_output(self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor) -> Operands:
        """See Kind. w_NK: the dequantized weight, by which `output` multiplies, so there is no error."""
        return exact(x_TK), exact(w_NK.t())

    def noisy_grad_input(self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor) -> Operands:
        return exact(g_TN), exact(w_NK)

    def noisy_grad_weight(self, spec: LinearSpec, g_TN: Tensor, x_TK: Tensor) -> Operands:
        return exact(g_TN.t()), exact(x_TK)


def _mm(a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
    assert isinstance(w_NK, Int8Weight), type(w_NK)
    return weight_only_mm(a_TM, w_NK.q_NK, w_NK.scale_N1, transposed, layer, gemm)


KIND = Int8WeightOnly()
