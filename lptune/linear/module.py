"""`nn.Linear` with a spec. Parameters, names and state dict are those of the layer it replaces."""

import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from lptune.config import UserError
from lptune.kernels import LIVE, NUMBER, expect_gather, handle_of_part, layer_handle
from lptune.linear.autograd import QuantizedTokens, low_precision_linear
from lptune.linear.dtensors import multiply_parts
from lptune.linear.instance_forward import has_own_forward, redirect
from lptune.linear.kind import LinearSpec, kind_of
from lptune.linear.weights.master_weight import is_master, make_master, master_like, plain_rows, renumber
from lptune.linear.weights.weight_amax import weight_changed


def local_part(parameter: Tensor, *, sums_gradient: bool = False) -> Tensor:
    """What this rank has of a parameter that tensor parallelism put into a DTensor; else itself.

    sums_gradient: ranks find parts of a gradient that they all need (of a parameter that each has whole).
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if sums_gradient else None)


class _Life:
    """A layer and its shallow copies hold the same one: the live state of their number ends with it."""


class LowPrecisionLinear(nn.Linear):
    """A linear layer whose GEMMs run as `spec` says. Made from an nn.Linear by `adopt`, never constructed."""

    spec: LinearSpec
    handle: Tensor
    """Names the layer inside the kernels. No buffer: it stays on the CPU when the model moves, and out of the
    state dict.
    """

    number: int
    """The same name for whoever is not compiled, nor can read a tensor's values (a dry run)."""

    @staticmethod
    def adopt(linear: nn.Linear, spec: LinearSpec) -> int:
        """Turns `linear` itself into a LowPrecisionLinear; returns its number, unique in this process.

        In place, so that every name, hook, tie and optimizer that knows the module or its parameters stays
        valid.
        """
        if has_own_forward(linear):
            redirect(linear)
        linear.__class__ = kind_of(spec).layer_class or LowPrecisionLinear
        assert isinstance(linear, LowPrecisionLinear)
        linear._enter()
        linear.spec, linear.handle = spec, layer_handle(linear.number)
        linear._adopt_weight()
        return linear.number

    def _enter(self) -> None:
        self.number, self._life = LIVE.enter(), _Life()
        weakref.finalize(self._life, LIVE.leave, self.number).atexit = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (deepcopy, pickle) is another layer to the kernels: what is kept by number is not shared."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()
        self.handle[NUMBER] = self.number
        if is_master(self.weight):
            renumber(self.weight, self.number)
            expect_gather(self.number)

    def __copy__(self) -> Self:
        """Shares its weight, and with it its number."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def _adopt_weight(self) -> None:
        """For kinds whose parameter is not the plain one."""

    def release(self) -> None:
        """Undoes `adopt`. Raises UserError once the layer is sharded."""
        if isinstance(self.weight, DTensor):
            raise UserError("unconvert() comes before fully_shard; a sharded model is exported or saved")
        if is_master(self.weight):
            plain = nn.Parameter(plain_rows(self.weight.detach()), requires_grad=self.weight.requires_grad)
            torch.utils.swap_tensors(self.weight, plain)
        LIVE.leave(self.number)
        del self.spec, self.number, self.handle, self._life
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # What leaves the process is plain; it aliases the live rows, as any state dict does.
        destination[f"{prefix}weight"] = plain_rows(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        w_NK = state_dict.get(f"{prefix}weight")
        if w_NK is not None and is_master(self.weight) and not is_master(w_NK):
            # Under assign=True it takes the parameter's place: it must be one that is gathered in 8 bits.
            state_dict[f"{prefix}weight"] = master_like(w_NK, self.weight)
        weight_changed(self.number)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor | QuantizedTokens) -> Tensor:
        """x: (..., in_features) in compute dtype, autocast's where it is on -> (..., out_features) in the
        same. DTensors in, DTensor out, where torch's tensor parallelism cut the weight (dtensors.py).
        """
        if not isinstance(self.weight, DTensor):
            return self.forward_part(x)
        assert isinstance(x, Tensor)
        if self.spec.token_gather == "low":
            raise UserError(
                "precision.tp_all_gather: torch's styles gather activations in compute dtype; take those of "
                "lptune.distributed (docs/distributed.md), or set it to auto"
            )
        out: Tensor = multiply_parts(_autocast(x), self.weight, self._multiply_part)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def forward_part(self, x: Tensor | QuantizedTokens) -> Tensor:
        """`forward` of plain tensors with what this rank has of weight and bias."""
        out = self.multiply(x)
        return out if self.bias is None else out + local_part(self.bias).to(out.dtype)

    def multiply(self, x: Tensor | QuantizedTokens) -> Tensor:
        """`forward_part` without the bias."""
        quantized_x: tuple[Tensor, Tensor] | None = None
        if isinstance(x, QuantizedTokens):
            x, *rest = x
            quantized_x = (rest[0], rest[1])
        else:
            x = _autocast(x)
        return self._multiply(x, local_part(self.weight), self.handle, quantized_x)

    def _multiply_part(self, x: Tensor, weight_NK: Tensor, part: int) -> Tensor:
        handle = handle_of_part(self.handle, part) if part and self.spec.stochastic else self.handle
        return self._multiply(x, weight_NK, handle)

    def _multiply(
        self,
        x: Tensor,
        weight_NK: Tensor,
        handle: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        out_TN = low_precision_linear(x_TK, weight_NK, handle, self.spec, quantized_x)
        return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])

    def extra_repr(self) -> str:
        """The spec beside the sizes."""
        s = self.spec
        return f"{super().extra_repr()}, {s.kind}: {s.output} / {s.grad_input} / {s.grad_weight}"


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def gather_in_8_bits(model: nn.Module, compute_dtype: torch.dtype) -> int:
    """Lets FSDP gather the weights of `model` in 8 bits where `convert` planned it; returns how many.

    After `convert`, and before `fully_shard`, whose param_dtype must be `compute_dtype`: rows are rounded to
    it before they are quantized. Raises UserError after `fully_shard`.
    """
    if any(isinstance(each, FSDPModule) for each in model.modules()):
        raise UserError("gather_in_8_bits() comes before fully_shard; this model is sharded already")
    layers = [each for each in model.modules() if isinstance(each, LowPrecisionLinear)]
    chosen = [each for each in layers if each.spec.gathers_low and not is_master(each.weight)]
    for layer in chosen:
        expect_gather(layer.number)
        make_master(layer, layer.number, layer.spec, compute_dtype)
    return len(chosen)


def weights_changed(model: nn.Module) -> None:
    """Says that weights of `model` were written other than by an optimizer or `load_state_dict`: scales that
    were precomputed are measured again. To be called on all ranks, whichever of them wrote.
    """
    for module in model.modules():
        if isinstance(module, LowPrecisionLinear):
            weight_changed(module.number)
