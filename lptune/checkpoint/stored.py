"""The tensors of a checkpoint: a list of named tensors, of any dtype and any number of dimensions.

    listed by                                     name             tensors
    the model                                     NAME             its parameters, as float values
    a quantized weight (linear/weights/)          PREFIX/NAME      tensors beside the values
    the optimizer (training/listed.py)            KEY/NAME         its state of the parameter NAME
    the caller of `CheckpointWriter.save`         any              amax histories, averages of weights, ...

This package does not know any PREFIX or KEY. Each file stores boxes of whole tensors (manifest.Shard), so a
checkpoint does not depend on a mesh or a number of ranks.

An optimizer lists its state by the two methods of `ListsState`. lptune.training implements them for
optimizers whose state has the shapes of the parameters. A DTensor is stored by the ranks that have its parts.
Any other tensor must be equal on all ranks: one rank stores it, all ranks load it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.base.text import with_addresses
from lptune.checkpoint.manifest import Shard
from lptune.distributed import Piece, World, fused_rows, is_first_holder, local_pieces, on_this_rank
from lptune.linear import stored_beside


@dataclass(frozen=True)
class Stored:
    """A tensor of a run, with its name in a checkpoint."""

    name: str
    tensor: Tensor
    """The live tensor, which is saved, or filled in place. Of a quantized weight, the dequantized values are
    stored.
    """
    fused_rows: Sequence[int] = ()
    """Rows of the matrices that are fused into this tensor; see `local_pieces`."""

    def pieces(self) -> list[Piece]:
        """The boxes of the tensor that this rank has, as views. Raises ValueError if it cannot be stored."""
        try:
            return local_pieces(self.tensor, self.fused_rows)
        except ValueError as error:
            raise ValueError(f"{self.name!r} cannot be stored: {error}") from None

    def local(self) -> Tensor:
        """This rank's part of the tensor, as one tensor."""
        return on_this_rank(self.tensor).detach()

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may have different parts. If not, the tensor is equal on all ranks."""
        return isinstance(self.tensor, DTensor)

    def is_written_by(self, world: World) -> bool:
        """Whether this rank is the first of the ranks that have this part."""
        return is_first_holder(self.tensor) if self.is_sharded else world.is_main


@runtime_checkable
class ListsState(Protocol):
    """An optimizer that lists its state for a checkpoint.

    names: the name of each parameter of the model. Both methods return live tensors by their names in a
    checkpoint: `KEY/NAME` for state of the parameter NAME. The optimizer chooses KEY.
    """

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> Mapping[str, Tensor]:
        """The tensors to save: all state that an exact continuation needs. num_updates: as in `restored`."""

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> Mapping[str, Tensor]:
        """Creates the state that `stored` listed when saving, with unspecified values, and lists it; loading
        fills it in place.

        saved: the names of all tensors in the checkpoint. num_updates: the number of updates so far.
        """


@runtime_checkable
class ConvertsState(ListsState, Protocol):
    """An optimizer that can continue from state that another one stored in another form."""

    def converted(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> Iterator[Mapping[str, Tensor]]:
        """Creates the state that is stored otherwise than this optimizer keeps it. Yields the tensors of one
        parameter at a time; when they are filled, the next iteration converts them. So never more than one
        parameter has both. Arguments as of `restored`, which is called afterwards.
        """


def named(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Stored]:
    """Tensors by name. `PREFIX/NAME` is cut in the same way as the parameter NAME of the model."""
    fused = fused_rows(model)
    return [Stored(name, t, fused.get(name.rpartition("/")[2], ())) for name, t in tensors.items()]


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of each parameter, as `ListsState` takes them."""
    return {parameter: name for name, parameter in model.named_parameters()}


def parameters_of(model: nn.Module) -> list[Stored]:
    """All parameters of the model, by name."""
    return named(model, dict(model.named_parameters()))


def beside_parameters_of(model: nn.Module) -> list[Stored]:
    """The tensors that quantized weights store beside their values, as `PREFIX/NAME`."""
    beside = {
        f"{prefix}/{name}": tensor
        for name, parameter in model.named_parameters()
        for prefix, tensor in stored_beside(parameter).items()
    }
    return named(model, beside)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, num_updates: int) -> list[Stored]:
    """The state of the optimizer, as `ListsState.stored` lists it."""
    return named(model, listing(optimizer).stored(names_of(model), num_updates))


def listing(optimizer: torch.optim.Optimizer) -> ListsState:
    """`optimizer` as a ListsState. Raises ValueError if it is none: checkpoints would lack its state."""
    if not isinstance(optimizer, ListsState):
        raise ValueError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} does not list its state for a "
            "checkpoint; use lptune.training.AdamW, or derive your optimizer from "
            f"lptune.training.ListsMoments as well ({with_addresses('docs/resume.md')})"
        )
    return optimizer


def check_names(stored: Iterable[Stored]) -> None:
    """Raises ValueError if two tensors have the same name, since a checkpoint would lack one of them."""
    seen = set[str]()
    for each in stored:
        if each.name in seen:
            raise ValueError(f"two tensors of the run are called {each.name!r}; a checkpoint holds one")
        seen.add(each.name)


def as_shards(stored: Stored) -> list[Shard]:
    """The boxes that this rank has, as entries of a manifest, with an empty file name."""
    shape, found = stored.tensor.shape, []
    for values, start, at in stored.pieces():
        box = [*zip(start, values.shape, strict=True), (0, 1), (0, 1)][: max(2, values.dim())]
        is_whole = values.shape[2:] == shape[2:]
        found.append(Shard("", tuple(box[:2] if is_whole else box), at))
    return found
