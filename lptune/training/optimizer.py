"""The optimizer that a config names, and the global gradient norm.

Plain AdamW on bfloat16 weights stops learning: near 1.0 a bfloat16 step is 0.4 %, and norms never move.
Parameters are therefore float32 here, or bfloat16 that is rounded stochastically (optimizer.master=none). For
forward they are cast to the compute dtype, by FSDP when it gathers or on one rank by compute weights. Weights
that are stored in INT8 have no master: their update is rounded stochastically (chunked_adamw.py).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.config import OptimizerConfig
from lptune.distributed import is_first_holder, on_this_rank
from lptune.linear import int8_rows
from lptune.training.adamw import AdamW, AveragingAdamW
from lptune.training.chunked_adamw import ChunkedAdamW
from lptune.training.from_host import kept_on_host
from lptune.training.muon import Muon, matrices
from lptune.training.sgd import SGD


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer of `cfg` over all trained parameters; weight decay on matrices only. Raises ValueError
    where there are none, and for averages, SGD and Muon of weights that are stored in INT8.

    seed: of the stochastic rounding of weights that are stored in INT8.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(names)
    # Weights of experts may have a mesh of their own, and torch updates the DTensors of one mesh together.
    alike: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in sorted(trained, key=lambda p: p.dim() < 2):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        alike.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": cfg.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in alike.items()
    ]
    if not groups:
        raise ValueError("no parameter has requires_grad, so there is nothing to train; unfreeze some")
    options: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    stores_int8 = any(int8_rows(parameter) is not None for parameter in trained)
    if cfg.kind in ("muon", "sgd"):
        if stores_int8:
            raise ValueError(
                f"{cfg.kind} does not round stochastically, as weights that are stored in INT8 need it"
            )
        if cfg.kind == "sgd":
            return SGD(groups, lr=cfg.lr, momentum=cfg.momentum)
        stacked = matrices(model)
        return Muon(groups, {p: stacked[name] for p, name in names.items() if name in stacked}, **options)
    from_host = kept_on_host(trained[0], cfg)
    # Moments in float32 are updated on the host as fast as the link would carry them, if backward need not
    # wait for that.
    on_host = from_host is not None and from_host.weights and cfg.kind == "adamw" and not cfg.in_backward
    if stores_int8 or cfg.kind != "adamw" or cfg.master == "none" or (from_host is not None and not on_host):
        if cfg.ema_decay:
            raise ValueError("ema_decay: averages need float32 weights and moments; leave it at 0")
        return ChunkedAdamW(groups, names, seed, cfg.kind, from_host, **options)
    # foreach AdamW on DTensors leaks in torch >= 2.12; fused has no temporaries and exists on CPU and CUDA.
    if cfg.ema_decay:
        return AveragingAdamW(groups, cfg.ema_decay, **options, fused=True)
    return AdamW(groups, **options, fused=True)


@torch.no_grad()
def grad_squares(model: nn.Module) -> Tensor:
    """This rank's share of the squared global norm of all gradients: 0-dimensional, float64.

    By hand and not through DTensor: one collective for any mesh. What several ranks hold counts once: a part
    of a DTensor on its first holder, a plain gradient, which is the same on all ranks, on the first rank.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    mine = [on_this_rank(gradient) for gradient in gradients if counts_here(gradient)]
    if not mine:
        device = next((parameter.device for parameter in model.parameters()), None)
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(mine, 2, dtype=torch.float32)  # few launches, not one for each gradient
    return torch.stack(norms).to(torch.float64).square().sum()


def counts_here(gradient: Tensor) -> bool:
    """Whether this rank's part of `gradient`, or of its parameter, counts in the global norm."""
    if isinstance(gradient, DTensor):
        return is_first_holder(gradient)
    return not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def scale_gradients(model: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Multiplies all gradients by max_norm / norm where that is below 1; 0: leaves them.

    The factor and the bits are those of nn.utils.clip_grads_with_norm_. That calls DTensor's dispatch for
    each gradient; here the parts on this rank are multiplied together. torch's fused AdamW could divide by
    the factor as `grad_scale` while it reads the gradients, which would save reading them here; it would
    write them back all the same, and change the bits of each clipped step.
    """
    gradients = [on_this_rank(p.grad) for p in model.parameters() if p.grad is not None]
    if not max_norm or not gradients:
        return
    factor = clipping_factor(max_norm, norm)
    for device in {gradient.device for gradient in gradients}:
        here = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(here, factor.to(device))


def clipping_factor(max_norm: float, norm: Tensor) -> Tensor:
    """By which gradients of the global norm `norm` are multiplied: at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
