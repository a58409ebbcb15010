"""The kinds that multiply in the compute dtype, by a weight of fewer bits: `int8_weight_only`, `int4_weight`.

    output      = x @ W'.T     W' = the weight as the kind has it; the op that multiplies makes it
    grad_input  = g @ W'
    grad_weight = g.T @ x      high; an ordinary tensor

x and g are not quantized.

`int8_weight_only` stores W in INT8: q, with one scale s per row, W' = q * s. That is 1 byte per parameter,
where the other kinds keep a float32 master weight and quantize a copy of it in every step. The cost is in the
update. AdamW changes a weight by about the learning rate, for example 1e-5. The weights that INT8 can store
in a row are s = amax / 127 apart, for example 1e-3, so rounding to nearest would undo every update. The
updated weight lies between two of them and is rounded to one of the two at random, so that the mean is right
(training/chunked_adamw.py). But each update of a single weight has an error of up to s, and these errors add
up like a random walk. Use this kind for models that otherwise do not fit.

`int4_weight` is quantization-aware training for INT4 servers: W' is W rounded to 4 bits, with a scale for
each 32 columns of a row (numerics/groups.py), and grad_weight passes straight through the rounding to the
float32 master weight. A model that is rounded after its training loses what the rounding moves. Here every
step sees the rounded weights, and the master weights settle where rounding costs little (Jacob et al.,
arXiv:1712.05877; the straight-through gradient is that of Bengio et al., arXiv:1308.3432). Training takes as
much memory as in high precision, and more time, since W is rounded anew for each GEMM. An export in INT4 has
the codes and scales of the next step, bit for bit.

Shapes: T tokens, K in_features, N out_features.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.kernels import GRAD_INPUT, OUTPUT, Quantized, int4_weight_mm, weight_only_mm
from lptune.linear.kind import Kind, LinearSpec, Needs, Saved
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.weights.int8_weight import INT8_SCALE, Int8Weight, dequantized, quantized, row_scales
from lptune.numerics import INT4_GROUP, quantize_groups


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


class Int8WeightLinear(LowPrecisionLinear):
    """The layer of `int8_weight_only`: its parameter is an Int8Weight, still the same object and name.

    The state dict has the dequantized values, which any other layer can load, and the scales
    (`weight_scale`). With both, loading restores q and s exactly. Without scales, it quantizes the values
    again, to nearest, and s becomes amax / 127 of the values. This differs from s if the values were rounded
    to bfloat16, or if stochastic rounding left no 127 in a row (about 2 in a million).
    """

    _SCALE = "weight_scale"

    @property
    def weight_scale(self) -> Tensor:
        """The scales, (N, 1) float32. An attribute, because torch's `get_model_state_dict` looks up every
        name of a state dict as an attribute of the module.
        """
        return row_scales(self.weight)

    def _adopt_weight(self) -> None:
        old = self.weight
        weight = nn.Parameter(Int8Weight.from_float(old.detach()), requires_grad=old.requires_grad)
        # The parameter stays the same object, so an optimizer that was made before still updates it.
        torch.utils.swap_tensors(old, weight)

    def release(self) -> None:
        """Undoes `adopt`: the parameter becomes a float tensor with the dequantized values."""
        if isinstance(self.weight, DTensor):
            super().release()  # always raises: a UserError for a sharded layer
        weight = nn.Parameter(dequantized(self.weight), requires_grad=self.weight.requires_grad)
        torch.utils.swap_tensors(self.weight, weight)
        super().release()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = dequantized(self.weight)
        destination[prefix + self._SCALE] = self.weight_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # pop, because strict loading reports each key that names no parameter. state_dict is torch's copy.
        scale_N1, w_NK = state_dict.pop(prefix + self._SCALE, None), state_dict.get(f"{prefix}weight")
        if w_NK is not None and w_NK.shape == self.weight.shape:
            state_dict[f"{prefix}weight"] = quantized(w_NK, scale_N1, self.weight)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Int8WeightOnly(WeightOnly):
    """`int8_weight_only`: W is stored in INT8, and all three GEMMs run in the compute dtype.

    No GEMM has options, because none quantizes an operand.
    """

    name = "int8_weight_only"
    served_as = "int8"
    fmt = "int8"
    row_scales = True  # a gather sends each row with its scale
    layer_class = Int8WeightLinear

    def multiply(self, a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
        assert isinstance(w_NK, Int8Weight), type(w_NK)
        return weight_only_mm(a_TM, w_NK.q_NK, w_NK.scale_N1, transposed, layer, gemm)

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """See Kind. The stored q and scales: no rounding, where `beside` has the scales."""
        rows = Int8Weight.from_float(w_NK, beside.get(INT8_SCALE))
        return Quantized(rows.q_NK, rows.scale_N1)

    def describe_gather(self, spec: LinearSpec) -> str:
        return spec.fmt


class Int4Weight(WeightOnly):
    """`int4_weight`: all three GEMMs run in the compute dtype, two of them with W rounded to 4 bits."""

    name = "int4_weight"
    served_as = "int4"
    fmt = "int4"
    weight_group = INT4_GROUP

    def multiply(self, a_TM: Tensor, w_NK: Tensor, transposed: bool, layer: Tensor, gemm: int) -> Tensor:
        return int4_weight_mm(a_TM, w_NK, transposed, layer, gemm)

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """See Kind. The values are codes of -7 to 7; the scales (N, ceil(K / 32))."""
        return Quantized(*quantize_groups(w_NK.to(compute_dtype)))

    def describe_gather(self, spec: LinearSpec) -> str:
        return "high"
