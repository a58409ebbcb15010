"""torch's AdamW, which lists its moments for checkpoints; and one that averages the weights as well.

    decay_n = min(decay, (1 + n) / (10 + n))              n: updates of this average, with this one
    ema     = decay_n * ema + (1 - decay_n) * weight      after each update; it starts as the initial weight

Where the learning rate is still high, the average usually has a lower loss than the weights of any one step,
as the mean of the last checkpoints has (checkpoint/export.py). The moving average takes 4 bytes per
parameter, and needs no checkpoints.
With the decay alone the initial weights would count for much in a run of about 1 / (1 - decay) steps; the
smaller decay of the first updates is that of TensorFlow's ExponentialMovingAverage. Each average has a count
of its own: one that a resumed run begins forgets the weights of its start as quickly.

The averages are a third moment of the optimizer: sharded as the weights are, stored as `ema/NAME`, counted by
`lptune plan`, kept to the bit in a step that is skipped. Nothing in training reads them.
"""

from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lptune.distributed import blocks_are_whole, first_column, on_this_rank
from lptune.training.listed import ListsMoments
from lptune.training.moments import BLOCK, FLOAT32, STORAGES, Make, Storage, convert, keys, new_state

_EMA, _COUNT = "ema", "ema_step"


class MomentsOfAdamW(ListsMoments):
    """Lists the two moments of AdamW, however they are stored (moments.py), and converts those of a
    checkpoint that stores them otherwise.
    """

    def storages(self, parameter: nn.Parameter) -> tuple[Storage, Storage]:
        """How the moments of `parameter` are stored: in float32."""
        return FLOAT32, FLOAT32

    def moment_keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return keys(self.storages(parameter))

    def new_moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        """As in ListsMoments, in the dtype and shape of `storages`."""
        if moment not in self.moment_keys(parameter):
            return super().new_moment(parameter, moment)
        return self.new_state(self.storages(parameter), parameter, torch.empty)[moment]

    def new_state(
        self, stored: tuple[Storage, Storage], parameter: nn.Parameter, make: Make = torch.zeros
    ) -> dict[str, Tensor]:
        return new_state(stored, parameter, make)

    @torch.no_grad()
    def converted(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> Iterator[dict[str, Tensor]]:
        """As checkpoint.stored.ConvertsState says, for parameters of which the checkpoint has both moments in
        another storage.
        """
        for parameter, name in names.items():
            if (theirs := self._stored_otherwise(parameter, name, saved)) is None:
                continue
            ours, read = self.storages(parameter), new_state(theirs, parameter, torch.empty)
            counted = self._counted(parameter, num_updates)
            state = self.state[parameter] = counted | self.new_state(ours, parameter)
            filled = {f"{key}/{name}": tensor for key, tensor in read.items()}
            if (count := f"{self.COUNT}/{name}") in saved:
                filled[count] = state[str(self.COUNT)]
            yield filled
            # Where a block is cut, this rank reads the scales of whole rows.
            column = 0 if blocks_are_whole(parameter, BLOCK) else first_column(parameter)
            convert(theirs, read, ours, state, column)

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> dict[str, Tensor]:
        """As in ListsMoments, without what `converted` has filled."""
        as_they_are = {p: name for p, name in names.items() if not self._stored_otherwise(p, name, saved)}
        return super().restored(as_they_are, saved, num_updates)

    def _stored_otherwise(
        self, parameter: nn.Parameter, name: str, saved: Collection[str]
    ) -> tuple[Storage, Storage] | None:
        """How a checkpoint stores the moments of `parameter`; None if as this one does, or not at all."""
        ours = self.moment_keys(parameter)
        for theirs in STORAGES.values():
            if keys(theirs) != ours and all(f"{key}/{name}" in saved for key in keys(theirs)):
                return theirs
        return None


def adamw_for(outer: torch.optim.Optimizer, **options: Any) -> torch.optim.AdamW:
    """torch's fused AdamW for some of the parameters of `outer`, by `step_for`. options: lr, betas, eps."""
    return torch.optim.AdamW([dict(group) for group in outer.param_groups], **options, fused=True)


def step_for(outer: torch.optim.Optimizer, parameters: Container[Tensor], inner: torch.optim.AdamW) -> None:
    """One update of those of the `parameters` that have a gradient, by `inner`, with the state, the groups
    and `found_inf` of `outer`.
    """
    inner.state = outer.state
    inner.found_inf = getattr(outer, "found_inf", None)  # type: ignore[attr-defined]
    inner.param_groups = [
        {**inner.defaults, **group, "params": [p for p in group["params"] if p in parameters]}
        for group in outer.param_groups
    ]
    inner.step()
    inner.found_inf = None  # type: ignore[attr-defined]


class AdamW(MomentsOfAdamW, torch.optim.AdamW):
    """torch's AdamW, which lists its two moments for checkpoints. Raises ValueError for amsgrad=True, which
    keeps a third.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if any(group["amsgrad"] for group in self.param_groups):
            raise ValueError("amsgrad=True keeps a third moment, which AdamW does not list; leave it out")


class AveragingAdamW(AdamW):
    """AdamW that keeps a moving average of each parameter, float32 as the parameter is."""

    def __init__(self, groups: list[dict[str, Any]], decay: float, **options: Any) -> None:
        """decay: of the averages, at least 0 and below 1. groups, options: of torch.optim.AdamW."""
        super().__init__(groups, **options)
        self._decay = decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the parameters that have a gradient, and of their averages. With fused=True, neither
        where the attribute `found_inf` is 1.
        """
        assert closure is None, "a closure is not supported"
        updated = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # torch makes the moments of a parameter only if its state is empty: averages are added after step().
        begun = {p: p.detach().clone() for p in updated if _EMA not in self.state.get(p, {})}
        super().step()
        for parameter, initial in begun.items():
            self.state[parameter] |= {_EMA: initial, _COUNT: torch.zeros_like(self.state[parameter]["step"])}
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_updated: Tensor | float = 1.0 if found_inf is None else 1 - found_inf
        for parameter in updated:
            state = self.state[parameter]
            state[_COUNT] += is_updated
            decay = torch.clamp((1 + state[_COUNT]) / (10 + state[_COUNT]), max=self._decay)
            on_this_rank(state[_EMA]).lerp_(on_this_rank(parameter.detach()), (1 - decay) * is_updated)

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> dict[str, Tensor]:
        """As in ListsMoments, and the averages with their counts. A parameter that a resume has frozen may
        have no average.
        """
        return super().stored(names, num_updates) | {
            f"{key}/{name}": self.state[parameter][key]
            for parameter, name in names.items()
            if _EMA in self.state.get(parameter, {})
            for key in (_EMA, _COUNT)
        }

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> dict[str, Tensor]:
        """As in ListsMoments. The averages of a run that had none begin at its next update."""
        listed = super().restored(names, saved, num_updates)
        for parameter, name in names.items():
            if f"{_EMA}/{name}" in saved:
                state = self.state[parameter]
                state |= {_EMA: self.new_moment(parameter, _EMA), _COUNT: torch.zeros_like(state["step"])}
                listed |= {f"{key}/{name}": state[key] for key in (_EMA, _COUNT)}
        return listed
