"""Muon: the update of a weight matrix is its momentum with all singular values made about 1. AdamW for the
rest: embedding, head, norms, biases, convolutions.

    momentum_buffer = lerp(momentum_buffer, gradient, 1 - 0.95)
    update          = lerp(gradient, momentum_buffer, 0.95)              Nesterov's
    weight          = weight * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(N, K)) * U V'

for update = U S V'. A gradient is nearly of low rank, so AdamW moves a matrix in few directions; U V' moves
it as far in each. It keeps 4 bytes a parameter, where AdamW keeps 8. The factor 0.2 * sqrt(max(N, K)) gives
U V' the root mean square that updates of AdamW usually have, so that both take one learning rate and one
weight decay (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982; the definitions
are those of torch.optim.Muon with adjust_lr_fn="match_rms_adamw").

U V' is approximated by five steps of a polynomial in matrices of the smaller dimension, which end with
singular values between 0.7 and 1.2:

    X = update / norm(update)
    X = a X + (b X X' + c (X X')^2) X

It needs the whole matrix, and FSDP gives each rank some rows. So n ranks take n matrices at a time, the
largest first: one all-to-all brings each its matrix, every rank works on one, and a second one brings the
rows back. No rank holds more than one whole matrix, and the products are divided by n. Which rank has
computed a matrix does not change its bits.

A weight that stacks several matrices (experts; q, k, v or gate, up that are fused) is treated as these.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.distributed import on_this_rank, planned_fused_rows
from lptune.kernels import type_of
from lptune.linear import FSDP_AXIS, plain_rows
from lptune.models import Backbone
from lptune.training.adamw import adamw_for, step_for
from lptune.training.listed import ListsMoments

MOMENTUM = 0.95
_A, _B, _C, _STEPS = 3.4445, -4.7750, 2.0315, 5
_RMS_OF_ADAMW = 0.2
_SMALLEST_NORM = 1e-7
_BUFFER = "momentum_buffer"


def matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name of each weight that Muon updates -> the rows of the matrices that it stacks.

    These are the trained weights of linear layers. Of a Backbone those of the embedding and the head are left
    out, since their rows belong to words, each of which occurs in few steps.
    """
    left, fused = set[nn.Parameter](), dict[str, tuple[int, ...]]()
    if isinstance(model, Backbone):
        left = {parameter for part in (model.embedding, model.head) for parameter in part.parameters()}
        fused = planned_fused_rows(model)
    found = dict[str, tuple[int, ...]]()
    for name, module in model.named_modules():
        weight = module.weight if isinstance(module, nn.Linear) else None
        if weight is None or not weight.requires_grad or weight in left:
            continue
        num_groups = getattr(module, "num_groups", 1)
        rows = (weight.shape[0] // num_groups,) * num_groups
        found[f"{name}.weight" if name else "weight"] = fused.get(f"{name}.weight", rows)
    return found


class Muon(ListsMoments, torch.optim.Optimizer):
    """Muon over float32 matrices, sharded by rows or not, and AdamW over all other parameters."""

    SKIPS_BY_FOUND_INF = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        stacked: Mapping[nn.Parameter, tuple[int, ...]],
        **options: Any,
    ) -> None:
        """groups: with weight_decay. stacked: each matrix -> the rows of those that it stacks. options: lr,
        and AdamW's betas and eps.
        """
        super().__init__(groups, options)
        self.stacked = stacked
        """The matrices, each with the rows of those that it stacks."""
        self._others = {p for group in groups for p in group["params"] if p not in stacked}
        self._adamw = adamw_for(self, **options)

    def moment_keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The momentum of a matrix, the two moments of AdamW of others."""
        return (_BUFFER,) if parameter in self.stacked else self.MOMENTS

    def _counted(self, parameter: nn.Parameter, num_updates: int) -> dict[str, Tensor]:
        return {} if parameter in self.stacked else super()._counted(parameter, num_updates)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the parameters that have a gradient; none where `found_inf` is 1. A collective."""
        assert closure is None, "a closure is not supported"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_updated: Tensor | float = 1.0 if found_inf is None else 1 - found_inf
        step_for(self, self._others, self._adamw)
        group_of = {
            p: group
            for group in self.param_groups
            for p in group["params"]
            if p in self.stacked and p.grad is not None
        }
        for together in in_turns(list(group_of)):
            nesterov = [self._momentum(parameter, found_inf) for parameter in together]
            updates = self._orthogonalized(together, nesterov)
            for parameter, update in zip(together, updates, strict=True):
                group = group_of[parameter]
                if found_inf is not None:
                    update = update.masked_fill(found_inf.bool(), 0)
                weight_NK = on_this_rank(plain_rows(parameter.detach()))
                if group["weight_decay"]:
                    weight_NK.mul_(1 - group["lr"] * group["weight_decay"] * is_updated)
                weight_NK.add_(update.view_as(weight_NK), alpha=-group["lr"])

    def _momentum(self, parameter: nn.Parameter, found_inf: Tensor | None) -> Tensor:
        """Adds this rank's gradient to its momentum. Returns what is to be orthogonalized, one-dimensional,
        in the dtype of the products.
        """
        state = self.state[parameter]
        if _BUFFER not in state:
            state[_BUFFER] = torch.zeros_like(plain_rows(parameter.detach()))
        assert parameter.grad is not None
        buffer_NK, g_NK = on_this_rank(state[_BUFFER]), on_this_rank(parameter.grad)
        new_NK = buffer_NK.lerp(g_NK, 1 - MOMENTUM)
        if found_inf is not None:
            new_NK = torch.where(found_inf.bool(), buffer_NK, new_NK)
        buffer_NK.copy_(new_NK)
        # bfloat16 is the published dtype, which many a CPU emulates.
        dtype = torch.bfloat16 if type_of(g_NK.device) == "cuda" else torch.float32
        return g_NK.lerp(new_NK, MOMENTUM).to(dtype).flatten()

    def _orthogonalized(self, together: Sequence[nn.Parameter], parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of 0.2 * sqrt(max(N, K)) * U V' of each matrix. parts: its rows of each."""
        mesh = _mesh(together[0])
        if mesh is None:
            (parameter,), (part,) = together, parts
            return [self._product(parameter, part)]
        group, (away, here) = mesh.get_group(FSDP_AXIS), _shares(together)
        whole = parts[0].new_empty(sum(here))
        dist.all_to_all_single(whole, torch.cat(list(parts)), here, away, group=group)
        if whole.numel():
            whole = self._product(together[mesh.get_local_rank(FSDP_AXIS)], whole)
        rows = parts[0].new_empty(sum(away))
        dist.all_to_all_single(rows, whole, away, here, group=group)
        return list(rows.split(away[: len(parts)]))

    def _product(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """`values`, those of the whole of `parameter`, orthogonalized and scaled; one-dimensional."""
        k = parameter.shape[1]
        stacked = self.stacked[parameter]
        if len(set(stacked)) == 1:
            x_BNK = values.view(len(stacked), stacked[0], k)
            return (orthogonalized(x_BNK) * _scale(stacked[0], k)).flatten()
        each = values.split([rows * k for rows in stacked])
        return torch.cat(
            [
                (orthogonalized(one.view(1, rows, k)) * _scale(rows, k)).flatten()
                for one, rows in zip(each, stacked, strict=True)
            ]
        )


def in_turns(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """As many matrices at a time as there are ranks that shard them, those of about one size together."""
    num = _num_ranks(parameters[0]) if parameters else 1
    ordered = sorted(parameters, key=torch.numel, reverse=True)
    return [ordered[first : first + num] for first in range(0, len(ordered), num)]


def exchanges(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The elements of each all-to-all of an update: the larger of what this rank sends and receives."""
    if not parameters or _mesh(parameters[0]) is None:
        return []
    return [max(map(sum, _shares(together))) for together in in_turns(parameters) for _ in range(2)]


def flops(num_rows: int, k: int) -> float:
    """Of the products of an update of one matrix."""
    low, high = sorted((num_rows, k))
    return _STEPS * (4.0 * low * low * high + 2.0 * low**3)


def orthogonalized(x_BNK: Tensor) -> Tensor:
    """About U V' of each matrix U S V' of `x_BNK`, in its dtype: singular values from 0.7 to 1.2, those below
    a hundredth of the norm less. 0 where a matrix is 0.
    """
    is_high = x_BNK.shape[1] > x_BNK.shape[2]
    x = x_BNK.mT if is_high else x_BNK
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp(min=_SMALLEST_NORM)).to(x.dtype)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_high else x


def _scale(num_rows: int, k: int) -> float:
    return _RMS_OF_ADAMW * math.sqrt(max(num_rows, k))


def _shares(together: Sequence[nn.Parameter]) -> tuple[list[int], list[int]]:
    """The elements that this rank sends to each one, and those that it receives: its rows of the matrix of
    that rank, and the rows that the other has of this rank's.
    """
    rank, num_ranks = _mesh(together[0]).get_local_rank(FSDP_AXIS), _num_ranks(together[0])

    def of(parameter: nn.Parameter, holder: int) -> int:
        num_rows, k = parameter.shape
        most = -(-num_rows // num_ranks)  # as FSDP shards them
        return k * max(0, min(most, num_rows - holder * most))

    none = [0] * num_ranks
    away = [of(parameter, rank) for parameter in together] + none[len(together) :]
    here = [of(together[rank], holder) for holder in range(num_ranks)] if rank < len(together) else none
    return away, here


def _mesh(parameter: nn.Parameter) -> Any:
    """The mesh that shards `parameter` by rows; None on one rank."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _num_ranks(parameter: nn.Parameter) -> int:
    """Number of the ranks that share the rows of a weight."""
    mesh = _mesh(parameter)
    return 1 if mesh is None else mesh.size(mesh.mesh_dim_names.index(FSDP_AXIS))
