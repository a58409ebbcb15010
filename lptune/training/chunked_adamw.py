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

What is in host memory (optimizer.cpu_offload, parallel.cpu_offload) visits the GPU for its update, these few
rows at a time (from_host.py).

Like torch's fused optimizers it does nothing in a step where its attribute `found_inf`, a 0-dimensional
float32 tensor on the device that updates, is 1. Only the host cannot know: it counts an update for
the random bits until `take_back` looks at what the device has counted.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lptune.distributed import first_column, local_rows, on_this_rank
from lptune.kernels import quantize_weight_rows, round_to_bfloat16, type_of
from lptune.linear import Int8Weight, int8_rows
from lptune.numerics import random_key
from lptune.training.adamw import MomentsOfAdamW, adamw_for, step_for
from lptune.training.from_host import FromHost, in_host_memory, visits
from lptune.training.moments import MOMENTS, Make, RandomBits, Storage, keys, storages

# Elements updated at once. Some tens of bytes for each is all the memory that an update takes. On a CPU they
# stay in the cache (2**22 took twice as long); a GPU wants few launches, and has not been measured.
_CPU_CHUNK, _GPU_CHUNK = 2**18, 2**23
_VISITING = 2**22  # from host memory: three such parts are on the GPU at a time


class ChunkedAdamW(MomentsOfAdamW, torch.optim.Optimizer):
    """torch.optim.AdamW over parameters of every kind, sharded or not; moments are stored as `kind` says."""

    SKIPS_BY_FOUND_INF = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        seed: int,
        kind: str = "adamw",
        from_host: FromHost | None = None,
        **options: Any,
    ) -> None:
        """groups: as for AdamW. names: of the parameters. kind: optimizer.kind. from_host: moments are kept
        in host memory. options: lr, betas, eps.
        """
        super().__init__(groups, options)
        self._names, self._seed = names, seed
        self._kind, self.from_host = kind, from_host
        self.gradients: Mapping[nn.Parameter, Tensor] = {}
        """Parts on this rank, of shape (rows, K) or any other, of parameters whose `grad` is not used."""
        self._plain_ones = {p for group in groups for p in group["params"] if self._is_plain(p)}
        self._plain = adamw_for(self, **options)

    def storages(self, parameter: nn.Parameter) -> tuple[Storage, Storage]:
        """How the moments of `parameter` are stored: as optimizer.kind says, if it is large."""
        return storages(self._kind, parameter)

    def device_of(self, parameter: nn.Parameter) -> torch.device:
        """Where updates of `parameter` are computed."""
        return parameter.device if self.from_host is None else self.from_host.device

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> dict[str, Tensor]:
        """As in ListsMoments, when the host may read it."""
        self._wait()
        return super().stored(names, num_updates)

    def new_state(
        self, stored: tuple[Storage, Storage], parameter: nn.Parameter, make: Make = torch.zeros
    ) -> dict[str, Tensor]:
        """As of AdamW, in host memory where moments are."""
        new = super().new_state(stored, parameter, make)
        if self.from_host is None:
            return new
        pinned = self.from_host.device.type == "cuda"
        return {key: in_host_memory(each, pinned=pinned) for key, each in new.items()}

    def _counted(self, parameter: nn.Parameter, num_updates: int) -> dict[str, Tensor]:
        counted = super()._counted(parameter, num_updates)
        return {key: each.to(self.device_of(parameter)) for key, each in counted.items()}

    def _wait(self) -> None:
        """The host waits for what the device sends back."""
        if self.from_host is not None and self.from_host.device.type == "cuda":
            torch.cuda.synchronize(self.from_host.device)

    def _is_plain(self, parameter: nn.Parameter) -> bool:
        if self.from_host is not None:
            return False
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
                if self._has_gradient(parameter) and parameter not in self._plain_ones:
                    self._update(parameter, group, found_inf)
        if self.from_host is not None and self.from_host.weights and not self.gradients:
            self._wait()  # the host measures weights after a step, and gathers them

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        return parameter in self.gradients or parameter.grad is not None

    def take_back(self) -> None:
        """After a step in which `found_inf` was 1 for some parameters: the next one draws the bits that it
        would have drawn. The host waits for the device.
        """
        for state in self.state.values():
            if "num_updates" in state:
                state["num_updates"] = int(state["step"])

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None) -> None:
        state, stored = self.state[parameter], self.storages(parameter)
        device = self.device_of(parameter)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= self.new_state(stored, parameter)
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
        own = [weight.q_NK, weight.scale_N1] if isinstance(weight, Int8Weight) else [_as_rows(weight)]
        num_rows, k = own[0].shape
        gradient = self.gradients.get(parameter)
        on_host = self.from_host is not None and self.from_host.weights
        away = [on_host and gradient is None, *[on_host] * len(own)]
        if gradient is None:
            assert parameter.grad is not None
            gradient = on_this_rank(parameter.grad)
        moments_of = [
            [_as_rows(on_this_rank(state[moment + suffix])) for suffix in storage.SUFFIXES]
            for moment, storage in zip(MOMENTS, stored, strict=True)
        ]
        tensors = [gradient.reshape(num_rows, k), *own, *moments_of[0], *moments_of[1]]
        most = _CPU_CHUNK if type_of(device) == "cpu" else _GPU_CHUNK if self.from_host is None else _VISITING
        chunk = max(1, most // k)
        # One buffer for all parts: memory that is new to the process costs a CPU more than the update.
        buffer_NK = None
        if isinstance(weight, Int8Weight) or weight.dtype != torch.float32:
            buffer_NK = torch.empty(min(chunk, num_rows), k, dtype=torch.float32, device=device)
        beta1, beta2 = group["betas"]
        starts = range(0, num_rows, chunk)
        if isinstance(gradient, FakeTensor):  # no values: further parts allocate and free as the second does
            starts = starts[:2]
        parts = [slice(start, min(start + chunk, num_rows)) for start in starts]
        for rows, (g_NK, *here) in zip(parts, self._visits(tensors, parts, away), strict=True):
            first = len(own)
            second = first + len(moments_of[0])
            weight_here = here[:first]
            rows_of = [tuple(here[first:second]), tuple(here[second:])]
            moments = [storage.read(of, 0) for storage, of in zip(stored, rows_of, strict=True)]
            if buffer_NK is None:
                (w_NK,) = weight_here
            elif isinstance(weight, Int8Weight):
                w_NK = _dequantize_into(buffer_NK[: rows.stop - rows.start], *weight_here)
            else:
                w_NK = buffer_NK[: rows.stop - rows.start].copy_(weight_here[0])
            torch._fused_adamw_(
                [w_NK],
                [g_NK.to(torch.float32)],
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
            bits = RandomBits(key, (first_row + rows.start) * k)
            for storage, of, moment, its_key in zip(stored, rows_of, moments, keys_of_moments, strict=True):
                storage.write(of, moment, bits._replace(key=its_key))
            if isinstance(weight, Int8Weight):
                q_NK, scale_N1 = weight_here
                updated = quantize_weight_rows(
                    w_NK,
                    *bits,
                    # w is then what it was, but would be rounded once more: 127 * s / 127 is not always s.
                    q_before=q_NK,
                    scale_before=scale_N1,
                    found_inf=found_inf,
                )
                q_NK.copy_(updated.q_MK)
                scale_N1.copy_(updated.scale_M1)
            elif buffer_NK is not None:
                weight_here[0].copy_(round_to_bfloat16(w_NK, *bits))
        if found_inf is not None:
            state["step"] -= found_inf

    def _visits(self, tensors: list[Tensor], parts: list[slice], away: list[bool]) -> Iterator[list[Tensor]]:
        """These rows of the tensors, where they are updated: of the gradient, of what a weight is stored in,
        and of its moments. away: which of the first two are in host memory.
        """
        if self.from_host is None:
            return ([tensor[rows] for tensor in tensors] for rows in parts)
        away = away + [True] * (len(tensors) - len(away))
        changed = [False] + [True] * (len(tensors) - 1)
        return visits(tensors, parts, self.from_host.device, away, changed)


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
