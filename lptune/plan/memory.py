"""A log of every storage that is allocated and freed, with its category.

`MemoryLog` is a TorchDispatchMode: it sees the result of every operator, with fake and real tensors, and logs
when a storage is made, freed or resized (FSDP2 frees a gathered weight by resizing it to zero). The category
of a storage is often known only later: the output of a reduce-scatter becomes a gradient when a parameter
gets it. So the log is written first, labels can be given at any time, and sums by label are computed at the
end.

A dry run executes one block for several that are alike (repeated_blocks.py). The log knows which block works,
and the sums are those of the whole model.

It counts the bytes that tensors ask for. It does not count rounding and fragmentation of the allocator, and
workspaces that a kernel allocates inside an operator.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune.distributed import Collectives, describe_collective
from lptune.plan.repeated_blocks import Blocks

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered weights"
UNREDUCED = "gradients not yet reduced"
ACTIVATIONS = "activations and temporaries"
TEACHER = "teacher"
CATEGORIES = (PARAMETERS, TEACHER, GRADIENTS, OPTIMIZER, GATHERED, UNREDUCED, ACTIVATIONS)


@dataclass
class _Span:
    """A part of the log: what a block did, or a phase between blocks."""

    phase: str
    blocks: Blocks | None = None
    number: int = 0
    """Of the block."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of a storage, change of bytes)"""

    @property
    def times(self) -> int:
        """For how many blocks it stands."""
        return self.blocks.times[self.number] if self.blocks else 1


class MemoryLog(TorchDispatchMode):
    """Logs the storages of the code in the block. Also counts collectives (see lptune.distributed).

    axes: names of process groups, as `distributed.axis_names` makes them.
    """

    def __init__(self, axes: dict[str, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives = Collectives()
        self._axes = axes or {}
        self._spans = [_Span("before")]
        self._labels: dict[int, str] = {}  # number -> category
        self._times: dict[int, float] = {}  # number -> for how many storages it stands, if more than one
        self._spanning: dict[int, float] = {}  # as _times, of what has tensors of several blocks
        self._replayed = set[int]()  # of those, what blocks allocate
        self._whole: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address of a live storage -> number

    def __enter__(self) -> "MemoryLog":
        self._resize = torch.UntypedStorage.resize_
        log, resize = self, self._resize

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            number = log._number(storage)
            result = resize(storage, size)
            log._labels[number] = GATHERED  # in a step, only gathered weights of FSDP are resized
            log._note(number, storage.nbytes() - log._sizes[number])
            return result

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A DTensor finds the layout of its result with fake tensors of the whole size, which take no memory:
        # the log looks only at its result. Other subclasses call operators on their parts, which come here.
        is_dtensor = any(issubclass(each, DTensor) for each in types)
        if not is_dtensor and any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for part in [result] if isinstance(result, Tensor) and not is_dtensor else _parts(result):
            self._number(part.untyped_storage())
        name = func._schema.name
        if "c10d" in name:
            found = describe_collective(func, args, result, self._axes)
            if found is not None:
                if whole := self._whole.get(found.num_bytes, 0):
                    self.span_blocks(args, whole / found.num_bytes)
                    found = found._replace(num_bytes=whole)
                self.collectives[found] += self._spans[-1].times
                if found.axis.startswith("fsdp") and found.operation != "all_to_all":
                    self.label(GATHERED if found.operation == "all_gather" else UNREDUCED, args)
        elif name == "fsdp::chunk_cat":
            self.label(UNREDUCED, args)
        return result

    def phase(self, name: str) -> None:
        """Starts a phase with this name."""
        self._spans.append(_Span(name))

    def block(self, blocks: Blocks, number: int) -> None:
        """Says that block `number` works now, until another block or a phase begins."""
        self._spans.append(_Span(self._spans[-1].phase, blocks, number))

    def span_blocks(self, tensors: Any, times: float, *, replayed: bool = False) -> None:
        """Says that the storages of `tensors` hold values of several blocks, those that were left out too, so
        that each stands for `times`. replayed: a block allocates them; others free them.
        """
        for part in _parts(tensors):
            number = self._number(part.untyped_storage())
            self._spanning[number] = times
            if replayed:
                self._replayed.add(number)

    def span_collectives(self, whole: Mapping[int, int]) -> None:
        """Says which collectives serve several blocks: bytes here -> bytes for the whole model."""
        self._whole |= {here: there for here, there in whole.items() if here != there}

    def repeat(self, times: Mapping[nn.Parameter, int], tensors_of: Callable[[nn.Parameter], Any]) -> None:
        """Says that each storage of `tensors_of(parameter)` stands for times[parameter] storages."""
        for parameter, count in times.items():
            for part in _parts(tensors_of(parameter)):
                self._times[self._number(part.untyped_storage())] = count

    def label(self, category: str, tensors: Any) -> None:
        """Labels the storages of `tensors` (in any nesting). Labels of lasting tensors (parameters,
        gradients, optimizer state) win over labels of temporary ones.
        """
        for part in _parts(tensors):
            number = self._number(part.untyped_storage())
            if category in (PARAMETERS, TEACHER, GRADIENTS, OPTIMIZER) or number not in self._labels:
                self._labels[number] = category

    def at_end(self) -> Counter[str]:
        """Bytes by category after the last event."""
        total: Counter[str] = Counter()
        for _, category, delta in self._all_events():
            total[category] += delta
        return total

    def peaks(self, *, regardless_of: Collection[str] = ()) -> dict[str, Counter[str]]:
        """Phase -> bytes by category at the time of the largest sum. Phases with one name are merged.

        regardless_of: categories that do not count in the sum.
        """
        found: dict[str, Counter[str]] = {}
        now: Counter[str] = Counter()
        largest = dict[str, int]()
        for phase, category, delta in self._all_events():
            now[category] += delta
            total = now.total() - sum(now[each] for each in regardless_of)
            if phase not in found or total > largest[phase]:
                found[phase], largest[phase] = Counter(now), total
        return found

    def _all_events(self) -> Iterator[tuple[str, str, int]]:
        """(phase, category, change of bytes) of all events of the whole model, in order.

        The events of a block are repeated where the blocks come for which it ran. Outside of blocks, code
        that walks over parameters (an optimizer) met each of its parameters once; there their storages count
        `_times`. Before and after a walk the sum is exact. Within it the sum is too small at a block that
        stands for others, but the last block, which stands for itself, takes as much memory later.
        """
        for blocks, group in itertools.groupby(self._spans, key=lambda span: span.blocks):
            spans, times = list(group), self._times
            if blocks is not None:
                ran, times = {span.number: span for span in spans}, {}
                assert len(ran) == len(spans), "a block ran twice in a phase"
                forward = spans[0].number <= spans[-1].number
                order = blocks.run_by if forward else reversed(blocks.run_by)
                spans = [ran[number] for number in order if number in ran]
            for span in spans:
                for number, delta in span.events:
                    count = self._spanning.get(number, times.get(number, 1))
                    if delta > 0 and number in self._replayed:
                        count = 1
                    yield span.phase, self._labels.get(number, ACTIVATIONS), round(delta * count)

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        known = self._numbers.get(address)
        if known is not None:
            return known[0]
        number = len(self._sizes)

        def freed(_: Any) -> None:
            del self._numbers[address]
            self._note(number, -self._sizes[number])

        self._numbers[address] = (number, weakref.ref(storage, freed))
        self._sizes[number] = 0
        self._note(number, storage.nbytes())
        return number

    def _note(self, number: int, delta: int) -> None:
        if delta:
            self._sizes[number] += delta
            self._spans[-1].events.append((number, delta))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors` on this rank; shared storages count once."""
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in _parts(tensors)}
    return sum(storages.values())


def pinned_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of pinned host memory that copies of the tensors take on this rank."""
    return sum(pinned_size(part.untyped_storage().nbytes()) for part in _parts(tensors))


def pinned_size(num_bytes: int) -> int:
    """Bytes of pinned host memory that a tensor of so many takes: torch's allocator takes a power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def _parts(tensors: Any) -> list[Tensor]:
    """The plain tensors inside DTensors and tensor subclasses."""
    parts: list[Tensor] = []
    for tensor in tree_leaves(list(tensors) if isinstance(tensors, Iterator) else tensors):
        if isinstance(tensor, DTensor):
            parts += _parts(tensor._local_tensor)
        elif isinstance(tensor, Tensor) and hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            parts += _parts(tuple(getattr(tensor, name) for name in names))
        elif isinstance(tensor, Tensor):
            parts.append(tensor)
    return parts
