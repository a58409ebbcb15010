"""What a checkpoint stores: a list of named tensors, of any dtype and any number of dimensions.

    listed by                               name             tensors
    the model                               NAME             its parameters, as plain float values
    a kind of weight (linear/stored.py)     PREFIX/NAME      what it keeps beside the values
    the optimizer (training/listed.py)      KEY/NAME         its state of the parameter NAME
    the caller of `CheckpointWriter.save`   any              amax histories, averages of weights, ...

This package knows no PREFIX and no KEY. A tensor lies in files by boxes of the whole (manifest.Shard), so
nothing of a mesh or a number of ranks is in a checkpoint.

An optimizer lists its state by two methods (`ListsState`; lptune.training has them for optimizers that keep
tensors of their parameters' shape). A DTensor is stored by the ranks that hold its parts. A plain tensor is
the same on every rank: one of them stores it, all of them load it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.checkpoint.manifest import Shard
from lptune.distributed import Piece, World, fused_rows, is_first_holder, local_pieces, on_this_rank
from lptune.linear import stored_beside


@dataclass(frozen=True)
class Stored:
    """A tensor of a run, as a checkpoint stores it."""

    name: str
    tensor: Tensor
    """Live: saved as it is, filled by loading. A quantized weight is stored by its dequantized values."""
    fused_rows: Sequence[int] = ()
    """See `local_pieces`."""

    def pieces(self) -> list[Piece]:
        """The boxes that this rank has, views of its storage."""
        try:
            return local_pieces(self.tensor, self.fused_rows)
        except ValueError as error:
            raise ValueError(f"{self.name!r} cannot be stored: {error}") from None

    def local(self) -> Tensor:
        """This rank's part in one tensor."""
        return on_this_rank(self.tensor).detach()

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may hold different parts; otherwise all of them hold the same."""
        return isinstance(self.tensor, DTensor)

    def is_written_by(self, world: World) -> bool:
        """Whether this rank is the first of those that hold this part."""
        return is_first_holder(self.tensor) if self.is_sharded else world.is_main


@runtime_checkable
class ListsState(Protocol):
    """An optimizer that lists its state for a checkpoint.

    names: of the model's parameters. Both return live tensors by the names under which a checkpoint stores
    them: `KEY/NAME` for state of the parameter NAME, with a KEY of the optimizer's choice.
    """

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> Mapping[str, Tensor]:
        """What is to be saved: all that an exact continuation needs. num_updates: as in `restored`."""

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> Mapping[str, Tensor]:
        """Makes the state that `stored` had listed, of unspecified values, and lists it to be filled.

        saved: the names of all tensors in the checkpoint. num_updates: how often the optimizer has stepped.
        """


def parameters_of(model: nn.Module) -> list[Stored]:
    """Every parameter, by its name."""
    return _named(model, dict(model.named_parameters()))


def beside_parameters_of(model: nn.Module) -> list[Stored]:
    """What kinds of weights store beside their values, as `PREFIX/NAME`."""
    beside = {
        f"{prefix}/{name}": tensor
        for name, parameter in model.named_parameters()
        for prefix, tensor in stored_beside(parameter).items()
    }
    return _named(model, beside)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, num_updates: int) -> list[Stored]:
    """The optimizer's state, as it lists it; see `ListsState.stored`."""
    return _named(model, listing(optimizer).stored(_names(model), num_updates))


def state_to_fill(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Collection[str], num_updates: int
) -> list[Stored]:
    """The optimizer's state, made new; see `ListsState.restored`."""
    return _named(model, listing(optimizer).restored(_names(model), saved, num_updates))


def further(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Stored]:
    """What `CheckpointWriter.save` was given. `PREFIX/NAME` is cut as the parameter NAME is."""
    return _named(model, tensors)


def listing(optimizer: torch.optim.Optimizer) -> ListsState:
    """The optimizer itself. Raises ValueError where it does not list its state: checkpoints would lack it."""
    if not isinstance(optimizer, ListsState):
        raise ValueError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} does not list its state for a "
            "checkpoint; use lptune.training.AdamW, or derive your optimizer from "
            "lptune.training.ListsMoments as well (docs/resume.md)"
        )
    return optimizer


def check_names(stored: Iterable[Stored]) -> None:
    """Raises ValueError where two tensors have one name: a checkpoint would lack one of them."""
    seen = set[str]()
    for each in stored:
        if each.name in seen:
            raise ValueError(f"two tensors of the run are called {each.name!r}; a checkpoint holds one")
        seen.add(each.name)


def as_shards(stored: Stored) -> list[Shard]:
    """The boxes that this rank has, as a manifest says it; the file is still to be named."""
    shape = tuple(stored.tensor.shape)
    found = []
    for values, start, at in stored.pieces():
        sizes = tuple(values.shape)
        (row, column), (rows, columns) = (*start, 0, 0)[:2], (*sizes, 1, 1)[:2]
        is_whole = sizes[2:] == shape[2:]
        beyond = () if is_whole else tuple(zip(start[2:], sizes[2:], strict=True))
        found.append(Shard("", row, rows, column, columns, at, beyond))
    return found


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _named(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Stored]:
    fused = fused_rows(model)
    # A parameter's own name, or PREFIX/NAME.
    return [Stored(name, t, fused.get(name.rpartition("/")[2], ())) for name, t in tensors.items()]
