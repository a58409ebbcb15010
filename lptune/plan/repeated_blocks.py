"""Which blocks of a model a dry run executes, and for which others each of them stands.

Most blocks of a model are alike: same modules, same window, same precision, same frozen parameters. What a
block allocates, frees and exchanges depends on its kind and on its neighbours: FSDP2 gathers the weights of
the next block and lets go of those of the one before. So a block stands for all others that are of its kind
and have neighbours of the same kinds. The first and the last block have none on one side, and stand for
themselves.

    llama3_1/8b    32 blocks, all alike               3 run: 0, 1, 31
    gemma3/1b      26 blocks, each sixth is global   10 run

The blocks that run follow each other as they might in the whole model: each of them finds the neighbours that
its surroundings say. A model whose blocks all differ runs whole.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from lptune import linear, models


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one model, of which some run. Made by `leave_out`."""

    run_by: tuple[int, ...]
    """For each block, in the order of forward, the number of the one that runs for it."""
    layers: dict[int, int]
    """Number of a low-precision layer that was left out -> that of the layer that runs for it."""

    @cached_property
    def times(self) -> Counter[int]:
        """Number of a block that runs -> the number of blocks that it stands for, with itself."""
        return Counter(self.run_by)

    def parameters(self, model: models.Backbone) -> dict[nn.Parameter, int]:
        """The parameters that stand for several, and for how many."""
        blocks = {number: block for number, block in _numbered(model) if self.times[number] > 1}
        return {each: self.times[number] for number, block in blocks.items() for each in block.parameters()}

    def watch(self, model: models.Backbone, begin: Callable[[int], None]) -> None:
        """Calls `begin` with the number of each block that begins its forward or its backward. Comes after
        `parallelize`, so that FSDP's hooks on a block run after this one.
        """
        for number, block in _numbered(model):
            block.register_forward_pre_hook(lambda *_, number=number: begin(number), prepend=True)
            block.register_forward_hook(partial(_at_gradient, partial(begin, number)), prepend=True)


class Repeated(nn.Module):
    """A model with the number of parameters of the whole one, for code that makes a list of all gradients."""

    def __init__(self, model: nn.Module, times: Mapping[nn.Parameter, int]) -> None:
        super().__init__()
        self.model, self._times = model, times

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields each parameter of the model as often as `times` says."""
        for each in super().parameters(recurse):
            yield from itertools.repeat(each, self._times.get(each, 1))


def _at_gradient(
    begin: Callable[[], None], _: nn.Module, __: Any, output: Tensor | tuple[Tensor, ...]
) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad:
        hidden.register_hook(lambda _: begin())


def leave_out(model: models.Backbone, reach: int) -> Blocks:
    """Removes the blocks of `model` for which others can run; the others keep their names. Comes after
    `convert` and before `parallelize`.

    reach: as many blocks before a block and after it may matter to it; len(layers): none is left out.
    """
    if model.facts.shares_between_blocks:
        reach = len(model.facts.layers)
    blocks, like = model.blocks, dict[int, int]()
    kinds, firsts = zip(*_kinds(model), strict=True)
    found = run_by(kinds, firsts, reach)
    for number, other in enumerate(found):
        if number != other:
            for left, here in zip(blocks[number].modules(), blocks[other].modules(), strict=True):
                if isinstance(left, linear.LowPrecisionLinear) and isinstance(here, type(left)):
                    like[left.number] = here.number
    model.keep_blocks(sorted(set(found)))
    return Blocks(found, like)


def run_by(kinds: Sequence[Hashable], firsts: Sequence[Hashable], reach: int) -> tuple[int, ...]:
    """For each block the number of the block that runs for it. Both have the same kind, and blocks of the
    same kinds around them, as far as `reach`; and both are the first for the same things.
    """
    ends = [None] * reach
    padded = [*ends, *kinds, *ends]
    around = [(tuple(padded[i : i + 2 * reach + 1]), first) for i, first in enumerate(firsts)]
    kept, i = list(range(len(kinds))), 0
    while i < len(kept):
        # Leaves out what follows i up to a block like i, as much as possible, if others like it stay.
        for end in range(len(kept) - 1, i, -1):
            rest = kept[: i + 1] + kept[end + 1 :]
            if around[kept[end]] == around[kept[i]] and {around[each] for each in rest} == set(around):
                kept = rest
                break
        i += 1
    first = {around[number]: number for number in reversed(kept)}
    # A block that is kept runs for itself, though an earlier one is like it: its neighbours need it there.
    return tuple(number if number in kept else first[each] for number, each in enumerate(around))


def _numbered(model: models.Backbone) -> Iterator[tuple[int, nn.Module]]:
    for name, block in model.blocks.named_children():
        yield int(name), block


def _kinds(model: models.Backbone) -> Iterator[tuple[Hashable, Hashable]]:
    """Of each block its kind, and of what it is the first reader: the tables of rotary positions and the
    masks, which blocks share, are freed in its backward.
    """
    read = set[Hashable]()
    # Frozen blocks have a backward only if something before them is trained.
    has_gradient = any(each.requires_grad for each in model.embedding.parameters())
    for layer, block in zip(model.facts.layers, model.blocks, strict=True):
        modules = tuple((type(each), getattr(each, "spec", None)) for each in block.modules())
        trained = tuple(each.requires_grad for each in block.parameters())
        kind = layer, modules, trained, has_gradient
        has_gradient |= any(trained)
        reads = {(has_gradient, each) for each in layer.reads}
        yield kind, frozenset(reads - read)
        read |= reads
