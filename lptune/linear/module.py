"""LowPrecisionLinear: an `nn.Linear` with a spec for its three GEMMs, which are one differentiable function.

`convert` changes the class of an existing nn.Linear. Parameters, names and state dict stay the same, so
checkpoints do not depend on the precision. The kind (lptune/linear/kinds/) computes the GEMMs. This file has
what all kinds have in common:

- The weight is always cast to the compute dtype before it is quantized. So both orders give the same bits:
  gather in the compute dtype and then quantize, or quantize and then gather.
- Autograd saves the weight itself, not the 8-bit values that forward made of it. FSDP frees the weight after
  forward and gathers it again for backward; saved 8-bit values would keep the whole unsharded model in
  memory. Backward quantizes the weight again and gets the same bits. A weight that comes in 8 bits (a
  RowTensor) needs no quantizing: FSDP gathers it again, and one rank keeps it until the end of backward.
"""

import weakref
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from lptune.base.errors import UserError
from lptune.kernels import LIVE, NUMBER, Quantized, cast, expect_gather, handle_of_part, layer_handle
from lptune.linear.dtensors import multiply_parts
from lptune.linear.instance_forward import has_own_forward, redirect
from lptune.linear.kind import LinearSpec, Needs
from lptune.linear.weights.compute_weights import is_parallelized
from lptune.linear.weights.master_weight import is_master, make_master, master_like, plain_rows, renumber
from lptune.linear.weights.row_tensor import RowTensor
from lptune.linear.weights.weight_amax import weight_changed


class QuantizedTokens(NamedTuple):
    """Activations that were gathered in 8 bits, as input of layers that would quantize them the same way.

    Autograd gives 8-bit tensors no gradient. The gradient flows through `carrier`, which has no values.
    """

    carrier_BSK: Tensor  # compute dtype, all elements one: only its shape and its gradient matter
    q_TK: Tensor  # int8 or float8, T = B * S
    scale: Tensor  # float32, (T, 1) or (1, 1)


def local_part(parameter: Tensor, *, sums_gradient: bool = False) -> Tensor:
    """This rank's part of a parameter that is a DTensor; any other tensor unchanged.

    sums_gradient: backward sums the gradient over ranks. For a replicated parameter of which each rank
    computes a part of the gradient.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if sums_gradient else None)


def low_precision_linear(
    x_TK: Tensor, w_NK: Tensor, layer: Tensor, spec: LinearSpec, quantized_x: Quantized | None = None
) -> Tensor:
    """Same as `x @ w.T` up to quantization. `spec` sets the precision of each of the three GEMMs.

    x_TK: compute dtype. w_NK: any float dtype, cast to x's dtype first; or a RowTensor, which is stored or
    gathered in 8 bits and is used unchanged. layer: the layer handle; kernels count GEMMs under its number.
    quantized_x: x, if it was gathered in 8 bits (spec.token_gather); x_TK then only carries the gradient.
    Returns (T, N) in x's dtype.
    """
    q, scale = quantized_x or (None, None)
    out_TN: Tensor = _Gemms.apply(  # type: ignore[no-untyped-call]
        x_TK, w_NK, layer, spec, q, scale
    )
    return out_TN


class _Gemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        spec: LinearSpec,
        q: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        quantized_x = None if q is None or scale is None else Quantized(q, scale)
        weight_NK = compute_weight(w_NK, x_TK.dtype)
        out_TN, saved = spec.kind.forward(spec, x_TK, weight_NK, layer, quantized_x)
        ctx.spec = spec
        # x is for grad_weight alone, which a frozen weight does not have.
        ctx.save_for_backward(w_NK, layer, *(saved if ctx.needs_input_grad[1] else ()))
        return out_TN

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, layer, *saved = ctx.saved_tensors
        weight_NK = compute_weight(w_NK, g_TN.dtype)
        needs = Needs(*ctx.needs_input_grad[:2])
        gx_TK, gw_NK = ctx.spec.kind.backward(
            ctx.spec, g_TN.contiguous(), weight_NK, tuple(saved), layer, needs
        )
        return gx_TK, gw_NK, None, None, None, None


def compute_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight by which a kind multiplies: w_NK in `dtype`; a RowTensor is used unchanged."""
    if isinstance(w_NK, RowTensor):  # stored or gathered in 8 bits
        return w_NK
    # After parallelize() or under FSDP the weight is cast already. The compiler cannot remove the op `cast`.
    return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)


def num_groups(module: nn.Module) -> int:
    """The number of groups of a grouped linear layer, an nn.Linear with an attribute of this name and a
    forward(x_SK, ends_E); 0 for any other module.
    """
    return int(getattr(module, "num_groups", 0))


class _Life:
    """Owned by a layer and its shallow copies together. When it is freed, the live state of the layer number
    is removed.
    """


class LowPrecisionLinear(nn.Linear):
    """A linear layer whose three GEMMs run as `spec` says. Made of an nn.Linear by `adopt`, not by a call."""

    spec: LinearSpec
    handle: Tensor
    """The layer handle, for kernels. Not a buffer, so that it stays on the CPU and out of the state dict."""

    number: int
    """The layer number: the value in `handle`, for eager code and dry runs, where tensors have no values."""

    _before: type[nn.Linear]
    """The class to which `release` returns."""

    @staticmethod
    def adopt(linear: nn.Linear, spec: LinearSpec) -> int:
        """Turns `linear` into a LowPrecisionLinear in place; returns its layer number.

        The module and its parameters stay the same objects, so that names, hooks, tied weights and optimizers
        stay valid.
        """
        if has_own_forward(linear):
            redirect(linear)
        before = type(linear)
        if num_groups(linear):
            from lptune.linear.grouped import LowPrecisionGroupedLinear  # imports this file

            linear.__class__ = LowPrecisionGroupedLinear
        else:
            linear.__class__ = spec.kind.layer_class or LowPrecisionLinear
        assert isinstance(linear, LowPrecisionLinear)
        linear._before = before
        linear._enter()
        linear.spec, linear.handle = spec, layer_handle(linear.number)
        linear._adopt_weight()
        return linear.number

    def _enter(self) -> None:
        self.number, self._life = LIVE.enter(), _Life()
        weakref.finalize(self._life, LIVE.leave, self.number).atexit = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives a copy (deepcopy, pickle) a new layer number, so that it shares no live state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()
        self.handle[NUMBER] = self.number
        if is_master(self.weight):
            renumber(self.weight, self.number)
            expect_gather(self.number)

    def __copy__(self) -> Self:
        """A shallow copy shares the weight, so it keeps the layer number."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def _adopt_weight(self) -> None:
        """Replaces the weight, in subclasses for kinds whose parameter is not a float tensor."""

    def release(self) -> None:
        """Undoes `adopt`, in place. Raises UserError if the layer is sharded."""
        if isinstance(self.weight, DTensor):
            raise UserError("unconvert() comes before fully_shard; a sharded model is exported or saved")
        if is_master(self.weight):
            plain = nn.Parameter(plain_rows(self.weight.detach()), requires_grad=self.weight.requires_grad)
            torch.utils.swap_tensors(self.weight, plain)
        LIVE.leave(self.number)
        before = self._before
        del self.spec, self.number, self.handle, self._life, self._before
        self.__class__ = before  # type: ignore[assignment]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The state dict has an ordinary tensor. It aliases the live rows, as in any state dict.
        destination[f"{prefix}weight"] = plain_rows(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        w_NK = state_dict.get(f"{prefix}weight")
        if w_NK is not None and is_master(self.weight) and not is_master(w_NK):
            # With assign=True this tensor replaces the parameter, which must still be gathered in 8 bits.
            state_dict[f"{prefix}weight"] = master_like(w_NK, self.weight)
        weight_changed(self.number)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor | QuantizedTokens) -> Tensor:
        """Same as `F.linear(x, weight, bias)` up to quantization: (..., in_features) -> (..., out_features).

        x: compute dtype, which the output has too; under autocast, x is cast to autocast's dtype. If torch's
        tensor parallelism cut the weight, x must be a DTensor, and the output is one (dtensors.py). Raises
        UserError then, if x is no such DTensor or precision.tp_all_gather asks for an 8-bit gather.
        """
        if not isinstance(self.weight, DTensor):
            return self.forward_part(x)
        assert isinstance(x, Tensor)
        if self.spec.token_gather == "low":
            raise UserError(
                "precision.tp_all_gather: torch's styles gather activations in compute dtype; take those of "
                "lptune.distributed (docs/distributed.md), or set it to auto"
            )
        group = self.spec.kind.weight_group
        out: Tensor = multiply_parts(autocast(x), self.weight, self._multiply_part, group)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def forward_part(self, x: Tensor | QuantizedTokens) -> Tensor:
        """`forward` with this rank's parts of weight and bias; x and the result are plain tensors."""
        out = self.multiply(x)
        return out if self.bias is None else out + local_part(self.bias).to(out.dtype)

    def multiply(self, x: Tensor | QuantizedTokens) -> Tensor:
        """`forward_part` without adding the bias."""
        if isinstance(x, QuantizedTokens):
            quantized = Quantized(x.q_TK, x.scale)
            return self._multiply(x.carrier_BSK, local_part(self.weight), self.handle, quantized)
        return self._multiply(autocast(x), local_part(self.weight), self.handle)

    def _multiply_part(self, x: Tensor, weight_NK: Tensor, part: int) -> Tensor:
        handle = handle_of_part(self.handle, part) if part and self.spec.stochastic else self.handle
        return self._multiply(x, weight_NK, handle)

    def _multiply(
        self, x: Tensor, weight_NK: Tensor, handle: Tensor, quantized_x: Quantized | None = None
    ) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        out_TN = low_precision_linear(x_TK, weight_NK, handle, self.spec, quantized_x)
        return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])

    def extra_repr(self) -> str:
        """The sizes, then the kind and how it runs the three GEMMs; for `print(model)`."""
        s = self.spec
        return f"{super().extra_repr()}, {s.kind.name}: {s.output} / {s.grad_input} / {s.grad_weight}"


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of autocast, if it is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def gather_in_8_bits(model: nn.Module, compute_dtype: torch.dtype) -> int:
    """Makes FSDP gather those weights of `model` in 8 bits for which the plan says so; returns their number.

    Call it after `convert` and before `fully_shard`. compute_dtype: must equal fully_shard's param_dtype;
    rows are rounded to it before they are quantized. Raises UserError after `fully_shard` or `parallelize`.
    """
    if is_parallelized(model):
        raise UserError(
            "gather_in_8_bits() comes before fully_shard and parallelize(); this model has been through one"
        )
    layers = [each for each in model.modules() if isinstance(each, LowPrecisionLinear)]
    chosen = [each for each in layers if each.spec.gathers_low and not is_master(each.weight)]
    for layer in chosen:
        expect_gather(layer.number)
        make_master(layer, layer.number, layer.spec, compute_dtype)
    return len(chosen)


def weights_changed(model: nn.Module) -> None:
    """Discards precomputed scales of `model`. Call it on all ranks after any rank wrote to weights, except by
    an optimizer or `load_state_dict`, which announce their changes themselves.
    """
    for module in model.modules():
        if isinstance(module, LowPrecisionLinear):
            weight_changed(module.number)
