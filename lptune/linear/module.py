"""`nn.Linear` with a spec. Parameters, names and state dict are those of the layer it replaces."""

import torch
from torch import Tensor, nn

from lptune.kernels import layer_handle
from lptune.linear.autograd import int8_rowcol_linear
from lptune.linear.spec import LinearSpec


class LowPrecisionLinear(nn.Linear):
    """A linear layer whose GEMMs run as `spec` says. Built by `convert`, which numbers the layers."""

    def __init__(self, linear: nn.Linear, spec: LinearSpec, number: int) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        # The very Parameter objects: optimizers, ties and hooks that know them stay valid.
        self.weight = linear.weight
        self.bias = linear.bias
        self.spec = spec
        # No buffer: it stays on the CPU when the model moves, and out of the state dict.
        self.handle = layer_handle(number)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) in compute dtype -> (..., out_features) in the same."""
        x_TK = x.reshape(-1, x.shape[-1])
        spec = self.spec
        out_TN: Tensor = int8_rowcol_linear(
            x_TK, self.weight, self.handle, spec.output, spec.grad_input, spec.grad_weight
        )
        out = out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        """The spec beside the sizes."""
        s = self.spec
        return f"{super().extra_repr()}, {s.kind}: {s.output} / {s.grad_input} / {s.grad_weight}"
