"""Experts of transformers' models as grouped linear layers.

transformers keeps the experts of a block in a module with parameters of three dimensions, and lets others say
how they run (ALL_EXPERTS_FUNCTIONS). Here each such parameter becomes a GroupedLinear in the same place,
whose weight stacks the matrices of all experts into one, (E * N, K): it is sharded, stored and converted as
that of any linear layer, and `linear.convert` finds it by `num_groups`. A parameter that is stored as
(E, K, N) is transposed while it is read and written.

Shapes: T tokens, H hidden, k experts of a token, S = T * k, E experts, K in_features, N out_features of one.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.base.errors import UserError
from lptune.hardware.planned import planned_device_type
from lptune.models.backbone import Part

NAME = "lptune"
"""Of `run_experts` in transformers' table."""

_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


class GroupedLinear(nn.Linear):
    """E bias-free linear layers K -> N. The rows of the input are sorted by group."""

    def __init__(self, num_groups: int, in_features: int, out_features: int) -> None:
        """out_features: N, of one group. The weight has E * N rows."""
        super().__init__(in_features, num_groups * out_features, bias=False)
        self.num_groups = num_groups

    def forward(self, x: Tensor, ends: Tensor, most: int | None = None) -> Tensor:  # type: ignore[override]
        """(S, K) -> (S, N). ends: int32 (E,), where the rows of each group end; the last is S. most: no group
        has more rows, for the converted layer that takes this one's place.
        """
        if (planned_device_type() or x.device.type) == "cuda" and x.dtype != torch.bfloat16:
            raise UserError("compute_dtype: experts run in bfloat16 on GPUs; set it to bfloat16")
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        w_EKN = weight.unflatten(0, (self.num_groups, -1)).transpose(1, 2)
        if not len(x):  # nobody has chosen these experts
            return torch.mm(x, w_EKN[0])
        return F.grouped_mm(x, w_EKN, offs=ends)


def ends_of_groups(sorted_groups_S: Tensor, num_groups: int) -> Tensor:
    """Where the rows of each group end, int32 (E,), for rows sorted by group."""
    numbers_E = torch.arange(num_groups, device=sorted_groups_S.device)
    return torch.searchsorted(sorted_groups_S, numbers_E, right=True).int()


@functools.cache
def register() -> None:
    """Makes transformers know `run_experts` under NAME."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def is_mixture(module: nn.Module) -> bool:
    """Whether `module` holds the experts of a block: it takes x_TH, the experts of each token, factors."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def num_experts(causal: nn.Module) -> int:
    """The number of experts of each mixture of `causal`, or what divides all of them; 0: it has none."""
    mixtures = filter(is_mixture, causal.modules())
    return math.gcd(*(len(p) for each in mixtures for p in each.parameters(recurse=False) if p.dim() == 3))


def stack(causal: nn.Module) -> dict[str, bool]:
    """Gives all experts of `causal` grouped linear layers, in place. Returns the names of the parameters that
    they replace, and whether the checkpoint's tensor of three dimensions is transposed.
    """
    found: dict[str, bool] = {}
    for prefix, module in causal.named_modules():
        if not is_mixture(module):
            continue
        for name in _PARAMETERS:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.dim() != 3:
                continue
            num_experts, rows, columns = parameter.shape
            if module.is_transposed:
                rows, columns = columns, rows
            del module._parameters[name]
            with parameter.device:
                module.add_module(name, GroupedLinear(num_experts, columns, rows))
            found[f"{prefix}.{name}"] = bool(module.is_transposed)
    return found


def stacked_parts(parts: Sequence[Part], num_rows: int, transposed: bool) -> list[Part]:
    """The parts of a parameter (E, N, K), or (E, K, N) if `transposed`, as parts of the matrix (E * N, K).
    num_rows: N.
    """
    row, column = (2, 1) if transposed else (1, 2)
    found = []
    for part in parts:
        dims = part.dims or (0, 1, 2)
        origin = part.origin or (0,) * sum(dim is not None for dim in dims)
        for number in range(part.sizes[0]):
            at = list(origin)
            if (dim := dims[0]) is not None:
                at[dim] += number
            first = (part.start[0] + number) * num_rows
            found.append(
                Part(
                    part.stored,
                    (first + part.start[row], part.start[column]),
                    (part.sizes[row], part.sizes[column]),
                    tuple(at),
                    (dims[row], dims[column]),
                )
            )
    return found


def run_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a block (T, H), as transformers' own implementations compute them.

    top_k_index: (T, k), the experts of each token. top_k_weights: (T, k), their factors.
    """
    num_chosen = top_k_index.shape[-1]
    chosen_S, order_S = torch.sort(top_k_index.reshape(-1), stable=True)
    x_SH = hidden_states[order_S // num_chosen]
    up = self.gate_up_proj if self.has_gate else self.up_proj
    most, first = len(hidden_states), 0  # a token's experts differ
    # Where ranks have experts of their own (expert_parallel.py), S are the rows of this rank's from here on.
    if exchange := getattr(self, "exchange", None):
        trip, first = exchange.trip(chosen_S), exchange.first
        x_SH, chosen_S, most = trip.there(x_SH), trip.experts_R, trip.most
    ends_E = ends_of_groups(chosen_S, up.num_groups)
    up_S = up(x_SH, ends_E, most)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        up_S = up_S + bias[chosen_S + first]
    out_SH = self.down_proj(self._apply_gate(up_S) if self.has_gate else self.act_fn(up_S), ends_E, most)
    if self.has_bias:
        out_SH = out_SH + self.down_proj_bias[chosen_S + first]
    if getattr(self, "has_post_expert_norm", False):
        out_SH = self.post_expert_norm(out_SH)
    if exchange:
        out_SH = trip.back(out_SH)
    out_SH = out_SH * top_k_weights.reshape(-1)[order_S][:, None]
    back_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    found: Tensor = out_SH[back_S].unflatten(0, (-1, num_chosen)).sum(1)
    return found.to(hidden_states.dtype)
