"""AdamW where a weight or its moments are not float32: moments of `adamw_8bit` and `adamw_bf16`, weights in
INT8 (`int8_weight_only`), weights in bfloat16 (optimizer.master=none).

    for a few rows at a time        there is never a float32 copy of a whole parameter
        w, m, v = float32 values
        w, m, v = adamw(w, gradient, m, v)      torch's own fused kernel
        stored  = w, m, v                       moments as in moments.py

A weight in INT8 or bfloat16 needs stochastic rounding. An update of AdamW is about the learning rate, far
smaller than the step between two of their values. Rounding the updated weight to nearest would give the old
one back, in every step. It is rounded up with the probability of the distance from below instead, so that the
expectation of the stored weight is the updated one, and small updates add up over many elements and steps.

    s = amax(row of w) / 127
    q = floor(w / s + u)            u uniform in [0, 1), but compared and not added, which would round

(in bfloat16 kernels.round_to_bfloat16)

u is a function of (seed, step, parameter's name, index of the element in the whole weight), so that a run
that was resumed, or that is sharded by FSDP over another number of ranks, draws the same. Tensor parallelism,
which also cuts rows and reorders those of fused layers, draws other numbers, equally independent.

An optimizer class and not hooks around torch's: a hook sees the weight before and after a step, and the step
itself would need float32 tensors to act on. Parameters that are float32, with float32 moments, are left to
torch's fused AdamW, which shares its state and groups with this class.

Like torch's fused optimizers it does nothing in a step where its attribute `found_inf`, a 0-dimensional
float32 tensor on the device of the parameters, is 1. Only the host cannot know: it counts an update for
the random bits until `take_back` looks at what the device has counted.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lptune.distributed import first_column, local_rows, on_this_rank
from lptune.kernels import quantize_weight_rows, round_to_bfloat16, type_of
from lptune.linear import Int8Weight, int8_rows
from lptune.numerics import random_key
from lptune.training.adamw import MomentsOfAdamW, adamw_for, step_for
from lptune.training.moments import MOMENTS, RandomBits, Storage, keys, new_state, storages

# Elements updated at once. Some tens of bytes for each is all the memory that an update takes. On a CPU they
# stay in the cache (2**22 took twice as long); a GPU wants few launches, and has not been measured.
_CPU_CHUNK, _GPU_CHUNK = 2**18, 2**23


class ChunkedAdamW(MomentsOfAdamW, torch.optim.Optimizer):
    """torch.optim.AdamW over parameters of every kind, sharded or not; moments are stored as `kind` says."""

    SKIPS_BY_FOUND_INF = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        seed: int,
        kind: str = "adamw",
        **options: Any,
    ) -> None:
        """groups: as for AdamW. names: of the parameters. kind: optimizer.kind. options: lr, betas, eps."""
        super().__init__(groups, options)
        self._names, self._seed = names, seed
        self._kind = kind
        self._plain_ones = {p for group in groups for p in group["params"] if self._is_plain(p)}
        self._plain = adamw_for(self, **options)

    def storages(self, parameter: nn.Parameter) -> tuple[Storage, Storage]:
        """How the moments of `parameter` are stored: as optimizer.kind says, if it is large."""
        return storages(self._kind, parameter)

    def _is_plain(self, parameter: nn.Parameter) -> bool:
        is_float32 = int8_rows(parameter) is None and parameter.dtype == torch.float32
        return is_float32 and keys(self.storages(parameter)) == MOMENTS

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient; none where `found_inf` is 1."""
        assert closure is None, "a closure is not supported"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        step_for(self, self._plain_ones, self._plain)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._plain_ones:
                    self._update(parameter, group, found_inf)

    def take_back(self) -> None:
        """After a step in which `found_inf` was 1 for some parameters: the next one draws the bits that it
        would have drawn. The host waits for the device.
        """
        for state in self.state.values():
            if "num_updates" in state:
                state["num_updates"] = int(state["step"])

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None) -> None:
        state, stored = self.state[parameter], self.storages(parameter)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= new_state(stored, parameter)
            state["num_updates"] = 0
        if "num_updates" not in state:
            # Once after a resume; from there on counted here, as reading it waits for the device.
            state["num_updates"] = int(state["step"])
        state["num_updates"] += 1
        state["step"] += 1
        # A part of each row: numbered by itself, under a key of its own.
        column = first_column(parameter)
        name = self._names[parameter] + (f"/{column}" if column else "")
        key = random_key(self._seed, state["num_updates"], name)
        # Not key ^ 1, under which element i would draw what element i ^ 1 of the weight does.
        keys_of_moments = [random_key(key, number, "moment") for number, _ in enumerate(MOMENTS)]

        weight, first_row = local_rows(parameter)
        assert parameter.grad is not None
        if not isinstance(weight, Int8Weight):
            weight = _as_rows(weight)
        num_rows, k = weight.shape
        g_all_NK = on_this_rank(parameter.grad).reshape(num_rows, k)
        parts = [
            tuple(_as_rows(on_this_rank(state[moment + suffix])) for suffix in storage.SUFFIXES)
            for moment, storage in zip(MOMENTS, stored, strict=True)
        ]
        chunk = max(1, (_CPU_CHUNK if type_of(weight.device) == "cpu" else _GPU_CHUNK) // k)
        # One buffer for all parts: memory that is new to the process costs a CPU more than the update.
        buffer_NK = None
        if isinstance(weight, Int8Weight) or weight.dtype != torch.float32:
            buffer_NK = torch.empty(min(chunk, num_rows), k, dtype=torch.float32, device=weight.device)
        beta1, beta2 = group["betas"]
        starts = range(0, num_rows, chunk)
        if isinstance(g_all_NK, FakeTensor):  # no values: further parts allocate and free as the second does
            starts = starts[:2]
        for start in starts:
            rows = slice(start, min(start + chunk, num_rows))
            rows_of = [tuple(tensor[rows] for tensor in tensors) for tensors in parts]
            moments = [storage.read(of, 0) for storage, of in zip(stored, rows_of, strict=True)]
            if buffer_NK is None:
                w_NK = weight[rows]
            elif isinstance(weight, Int8Weight):
                w_NK = _dequantize_into(
                    buffer_NK[: rows.stop - start], weight.q_NK[rows], weight.scale_N1[rows]
                )
            else:
                w_NK = buffer_NK[: rows.stop - start].copy_(weight[rows])
            torch._fused_adamw_(
                [w_NK],
                [g_all_NK[rows].to(torch.float32)],
                [moments[0]],
                [moments[1]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            bits = RandomBits(key, (first_row + start) * k)
            for storage, of, moment, its_key in zip(stored, rows_of, moments, keys_of_moments, strict=True):
                storage.write(of, moment, bits._replace(key=its_key))
            if isinstance(weight, Int8Weight):
                q_NK, scale_N1 = weight.q_NK[rows], weight.scale_N1[rows]
                updated = quantize_weight_rows(
                    w_NK,
                    *bits,
                    # w is then what it was, but would be rounded once more: 127 * s / 127 is not always s.
                    q_before=q_NK,
                    scale_before=scale_N1,
                    found_inf=found_inf,
                )
                weight.store(rows, updated)
            elif buffer_NK is not None:
                weight[rows] = round_to_bfloat16(w_NK, *bits)
        if found_inf is not None:
            state["step"] -= found_inf


def _as_rows(tensor: Tensor) -> Tensor:
    """A view as a matrix; a vector has rows of one element. Without -1, which is ambiguous if a rank has no
    rows.
    """
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))


def _dequantize_into(w_NK: Tensor, q_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """`q * scale` in float32, written to `w_NK`, which is returned."""
    if type_of(w_NK.device) == "cpu":  # where torch.mul would first copy q to new memory
        return w_NK.copy_(q_NK).mul_(scale_N1)
    return torch.mul(q_NK, scale_N1, out=w_NK)
