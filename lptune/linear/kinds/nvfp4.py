"""`nvfp4`: all three GEMMs in 4 bits, as NVIDIA trains them (arXiv:2509.25149).

    output      = x @ W.T              x 1 x 16,                W 16 x 16
    grad_input  = g @ W                g 1 x 16,                W 16 x 16: the same values
    grad_weight = (R g).T @ (R x)      R g, R x in 16 x 1

Each operand has e4m3 scales of blocks and a float32 scale of its own (lptune/numerics/nvfp4.py). Four choices
of the paper keep such coarse numbers from harming the training:

- W has square blocks, so the gradient is that of the very weight by which `output` multiplied.
- g is always rounded stochastically, as with `precision.stochastic_rounding`: rounding errors of gradients
  otherwise add up over the steps. x and W are rounded to nearest.
- R rotates both operands of grad_weight along the tokens, by Hadamard blocks of 16 with random signs that
  never change. Outliers spread over their block; the product stays the same.
- Some layers stay high: the head, and the last blocks (the paper: 16 % of the layers, most of them at the
  end; with none its training diverged). Name them in `precision.skip`.

x is saved in compute dtype, since its values for grad_weight are others than those of `output`. FSDP gathers
W in compute dtype. Only Blackwell GPUs have GEMMs for 4 bits; elsewhere they are emulated, and the plan says
so.

Shapes: T tokens, K in_features, N out_features.
"""

import torch
from torch import Tensor

from lptune.kernels import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Quantized, nvfp4_mm, quantize_nvfp4
from lptune.linear.kind import Kind, LinearSpec, Needs, Saved
from lptune.numerics import NVFP4_BLOCK, QuantizedNvfp4, dequantize_nvfp4


class Nvfp4(Kind):
    """`nvfp4`: e2m1 in blocks of 16, in W of 16 x 16, with scales of blocks and of the tensor."""

    name = "nvfp4"
    fmt = "e2m1"
    operations = ("fp4_gemm",)
    emulated_where_missing = True

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """See Kind. What it saves is x, for grad_weight."""
        assert quantized_x is None, "blocks of x are wanted along K and along T: no one gather brings both"
        if spec.output == "high":
            return x_TK @ _high_weight(spec, w_NK, x_TK.dtype).t(), (x_TK,)
        x, w = quantize_nvfp4(x_TK, 1), quantize_nvfp4(w_NK, 1, square=True)
        return _multiply(x, w, x_TK.dtype, layer, OUTPUT, spec.emulate), (x_TK,)

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        dtype, random, gx_TK, gw_NK = g_TN.dtype, layer if spec.stochastic else None, None, None
        if needs.input and spec.grad_input == "high":
            gx_TK = g_TN @ _high_weight(spec, w_NK, dtype)
        elif needs.input:
            g, w = quantize_nvfp4(g_TN, 1, layer=random), quantize_nvfp4(w_NK, 0, square=True)
            gx_TK = _multiply(g, w, dtype, layer, GRAD_INPUT, spec.emulate)
        if needs.weight and spec.grad_weight == "high":
            gw_NK = g_TN.t() @ saved[0]
        elif needs.weight:
            g = quantize_nvfp4(g_TN, 0, rotated=True, layer=random)
            x = quantize_nvfp4(saved[0], 0, rotated=True)
            gw_NK = _multiply(g, x, dtype, layer, GRAD_WEIGHT, spec.emulate)
        return gx_TK, gw_NK

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return f"{spec.fmt} {'rotated ' * (gemm == 'grad_weight')}block{NVFP4_BLOCK}"

    def describe_gather(self, spec: LinearSpec) -> str:
        return "high"


def _high_weight(spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a GEMM that is `high`: its values in 4 bits, if `output` multiplies by them."""
    if not spec.high_uses_8_bit_weight:
        return w_NK
    return dequantize_nvfp4(quantize_nvfp4(w_NK, 1, square=True), dtype)


def _multiply(
    a: QuantizedNvfp4, b: QuantizedNvfp4, dtype: torch.dtype, layer: Tensor, gemm: int, emulate: bool
) -> Tensor:
    """a @ b.T in `dtype`."""
    scales = (a.scale, b.scale.t(), a.tensor_scale_11, b.tensor_scale_11)
    return nvfp4_mm(a.q_MK, b.q_MK.t(), *scales, dtype, layer, gemm, emulate=emulate)
