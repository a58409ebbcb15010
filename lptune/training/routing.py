"""Routing agreement: how many tokens does a mixture send to the same experts in low and in high precision?

A router stays high, but its input comes from layers in low precision. A token that two experts suit equally
well goes to another one by a rounding, which no error of a layer tells: each layer is right for the input
that it got. So the shadow check counts, for each mixture of experts, the tokens whose set of experts is the
same in its two passes. Padding is left out: its tokens are alike, and change their experts all together.

    routing = Routing(model, batch.is_padding)
    with routing.of("low"): ...        a forward, with or without backward
    with routing.of("high"): ...
    routing.counts()                   tokens with the same experts, and all tokens, by mixture

Hooks see the experts that a token goes to, and are there during the passes alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lptune.models import Backbone, part, summed


class Routing:
    """The experts that the tokens of two passes go to."""

    def __init__(self, model: nn.Module, is_padding_BS: Tensor | None = None) -> None:
        """model: any; only a Backbone says what its mixtures are. is_padding_BS: bool, of the whole rows of
        a forward; None: none is padding. In a forward of another number of tokens, all count.
        """
        self._mixtures = model.mixtures if isinstance(model, Backbone) else {}
        self._group = model.group if isinstance(model, Backbone) else None
        if is_padding_BS is not None:
            is_padding_BS = part(is_padding_BS, self._group)
        self._counts_T = None if is_padding_BS is None else ~is_padding_BS.flatten()
        self._chosen: dict[str, dict[str, list[Tensor]]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Within it, each forward of a mixture is noted under `name`."""
        noted = self._chosen[name] = {mixture: [] for mixture in self._mixtures}

        def note(mixture: str, args: tuple[Any, ...]) -> None:
            noted[mixture].append(args[1].detach().sort(-1).values)

        hooks = [
            module.register_forward_pre_hook(lambda _, args, mixture=mixture: note(mixture, args))
            for mixture, module in self._mixtures.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def counts(self) -> dict[str, Tensor]:
        """By mixture, float32 (2,): the number of tokens whose experts are the same under both names, in any
        order, and the number of all tokens, padding apart: of whole rows, on each rank that shares them. A
        collective of these ranks.
        """
        low, high = self._chosen.values()
        found = {}
        for mixture in self._mixtures:
            # A forward that backward recomputes comes after those of the pass, and has no counterpart.
            pairs = zip(low[mixture], high[mixture], strict=False)
            if same := [self._without_padding((one == other).all(-1).flatten()) for one, other in pairs]:
                same_T = torch.cat(same).float()
                counts_2 = torch.stack([same_T.sum(), torch.ones_like(same_T).sum()])
                found[mixture] = summed(counts_2, self._group)
        return found

    def _without_padding(self, same_T: Tensor) -> Tensor:
        if self._counts_T is None or same_T.shape != self._counts_T.shape:
            return same_T
        return same_T[self._counts_T.to(same_T.device)]
