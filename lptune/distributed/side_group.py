"""A second gloo group with its own timeout, for collectives of work that waits for disks.

Ranks that save or verify files agree on a few numbers. The group of training cannot be used for that. The
collectives of a background thread must not come between those of the main thread. And NCCL ends a run whose
ranks wait ten minutes for each other, which a large file on a slow disk may take. Text is sent as bytes,
since the object collectives of torch unpickle what they receive.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lptune.base.errors import UnavailableError, UserError
from lptune.distributed.session import World

_TIMEOUT = timedelta(hours=3)
_LINE_BYTES = 2048


class SideGroup:
    """Every rank makes one; all call its methods in the same order, from one thread at a time.

    world: None for a process without other ranks.
    """

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world is not None else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def close(self) -> None:
        """Destroys the group. No collective may be running."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def total(self, value: int) -> int:
        """The sum of the values of all ranks."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def of_main(self, value: int) -> int:
        """The value of rank 0, on all ranks."""
        return self.total(value if self.rank == 0 else 0)

    def all_of_main(self, values: Sequence[int]) -> list[int]:
        """The values of rank 0, on all ranks. Of a network folder, others may see an older state."""
        number = self.of_main(len(values))
        return [self.of_main(values[i] if self.rank == 0 else 0) for i in range(number)]

    def gather(self, value: Any) -> list[Any]:
        """`value`, which JSON can hold, of every rank in their order; empty on all but rank 0."""
        if self._group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes, group=self._group)
        padded = torch.nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(padded, found or None, dst=0, group=self._group)
        parts = zip(found, sizes.tolist(), strict=False)
        return [json.loads(each[:size].numpy().tobytes()) for each, size in parts]

    @contextmanager
    def together(
        self, errors: tuple[type[Exception], ...], line_of: Callable[[Exception], str]
    ) -> Iterator[None]:
        """A block of work. After it, either all ranks go on, or all raise UserError (UnavailableError, if the
        errors of all ranks that failed are such).

        errors: exceptions that are failures of the user's machine or input. line_of: makes the message of
        one; that of the first rank with such an error is raised everywhere. Any other exception is raised on
        its rank only; the other ranks then wait for a rank that is gone, and the launcher ends them.
        """
        line, lasting = None, None
        try:
            yield
        except errors as error:
            line = line_of(error)
            lasting = None if isinstance(error, UnavailableError) else line
        line = self.first_line(line)
        if line is not None:
            lasting = self.first_line(lasting)
            raise UnavailableError(line) if lasting is None else UserError(lasting)

    def first_line(self, line: str | None) -> str | None:
        """The line of the first rank that has one, on all ranks; None if none has. Cut at 2,048 bytes."""
        source = self._reduce(self.size if line is None else self.rank, dist.ReduceOp.MIN)
        if source == self.size or self._group is None:
            return line
        text = torch.zeros(_LINE_BYTES, dtype=torch.uint8)
        if line is not None:
            encoded = torch.frombuffer(bytearray(line.encode()), dtype=torch.uint8)[:_LINE_BYTES]
            text[: encoded.numel()] = encoded
        dist.broadcast(text, src=source, group=self._group)
        return bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")

    def _reduce(self, value: int, how: dist.ReduceOp.RedOpType) -> int:
        if self._group is None:
            return value
        number = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(number, op=how, group=self._group)
        return int(number.item())


@contextmanager
def side_group(world: World | None) -> Iterator[SideGroup]:
    """Makes a SideGroup and closes it after the block. A collective."""
    group = SideGroup(world)
    yield group
    group.close()  # not after an error: other ranks may wait in a collective


@contextmanager
def machine_first(world: World, what: str = "reading and tokenizing data") -> Iterator[None]:
    """Runs the block on the first rank of every machine, then on the other ranks, which can use its result.

    A collective. A UserError of a first rank is raised on all ranks, and the others skip the block. what: is
    shown as a phase of the run.
    """
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with world.phase(what), side_group(world) as group:
        with group.together((UserError,), str):
            if is_first:
                yield
        if not is_first:
            yield
