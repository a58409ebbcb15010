"""`nn.Linear` with a spec. Parameters, names and state dict are those of the layer it replaces."""

import itertools

import torch
from torch import Tensor, nn

from lptune.kernels import forget_amaxes, layer_handle
from lptune.linear.autograd import low_precision_linear
from lptune.linear.spec import LinearSpec

_numbers = itertools.count()


class LowPrecisionLinear(nn.Linear):
    """A linear layer whose GEMMs run as `spec` says. Made from an nn.Linear by `adopt`, never constructed."""

    spec: LinearSpec
    handle: Tensor
    """Names the layer inside the kernels. No buffer: it stays on the CPU when the model moves, and out of the
    state dict.
    """

    @staticmethod
    def adopt(linear: nn.Linear, spec: LinearSpec) -> int:
        """Turns `linear` itself into a LowPrecisionLinear; returns its number, unique in this process.

        In place, so that every name, hook, tie and optimizer that knows the module or its parameters stays
        valid.
        """
        number = next(_numbers)
        linear.__class__ = LowPrecisionLinear
        assert isinstance(linear, LowPrecisionLinear)
        linear.spec, linear.handle = spec, layer_handle(number)
        return number

    def release(self) -> None:
        """Undoes `adopt`."""
        forget_amaxes(int(self.handle[0]))
        del self.spec, self.handle
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) in compute dtype, autocast's where it is on -> (..., out_features) in the
        same.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x_TK = x.reshape(-1, x.shape[-1])
        out_TN = low_precision_linear(x_TK, self.weight, self.handle, self.spec)
        out = out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        """The spec beside the sizes."""
        s = self.spec
        return f"{super().extra_repr()}, {s.kind}: {s.output} / {s.grad_input} / {s.grad_weight}"
