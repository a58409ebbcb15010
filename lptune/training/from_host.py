"""Updates of tensors in host memory: a few rows at a time visit the GPU.

    bring        rows 1 | rows 2 | rows 3 | ...              a stream of its own
    update                rows 1 | rows 2 | rows 3 | ...     the stream that updates
    send back                      rows 1 | rows 2 | ...     a third one

Three buffers go round, so three parts of a parameter are on the GPU at a time, however large the model is,
and the host never waits: `bring` waits on the device until its buffer was sent back. The copies of both
directions run beside each other, as the link has both. They need pinned memory, without which a copy is no
longer asynchronous (and slower).

On a CPU, which has no second memory, the same code copies from and to buffers, one after the other.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lptune.config import OptimizerConfig
from lptune.distributed import on_this_rank
from lptune.linear import placed_as

NUM_BUFFERS = 3


class FromHost(NamedTuple):
    """Says that moments are in host memory, and updates happen elsewhere."""

    device: torch.device
    """On which updates are computed."""
    weights: bool
    """Whether weights and gradients are in host memory, too (parallel.cpu_offload)."""


def kept_on_host(parameter: nn.Parameter, cfg: OptimizerConfig) -> FromHost | None:
    """What of a model with this parameter is in host memory; None: nothing."""
    device = parameter.device
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:  # cpu_offload
        device = torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
        return FromHost(device, weights=True)
    return FromHost(device, weights=False) if cfg.cpu_offload else None


def in_host_memory(tensor: Tensor, *, pinned: bool) -> Tensor:
    """A copy in host memory, sharded as `tensor` is. pinned: for a GPU."""
    local = on_this_rank(tensor)
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned).copy_(local)
    if isinstance(tensor, DTensor):
        return placed_as(tensor, copy, tensor.shape)
    return copy


def visits(
    tensors: Sequence[Tensor],
    parts: Sequence[slice],
    device: torch.device,
    away: Sequence[bool],
    changed: Sequence[bool],
) -> Iterator[list[Tensor]]:
    """For each of `parts`, slices of rows of which the first is no shorter than another, yields these rows of
    each tensor on `device`. What the caller writes there is in the tensors afterwards.

    away: which of the tensors are in host memory; of the others the rows themselves are yielded. changed:
    which are written to. The tensors are right for what the current stream does after the last part; the host
    must wait for that before it reads them.
    """
    if not parts:
        return
    streams = streams_of(device)
    rounds = [
        [
            torch.empty_like(tensor[parts[0]], device=device) if is_away else None
            for tensor, is_away in zip(tensors, away, strict=True)
        ]
        for _ in range(min(NUM_BUFFERS, len(parts)))
    ]
    sent = [streams.mark(streams.update())] * len(rounds)  # what came before: a gradient, the last update

    def bring(number: int) -> tuple[list[Tensor], Any]:
        rows = parts[number]
        with streams.use(streams.bring):
            streams.wait(streams.bring, sent[number % len(rounds)])
            here = [
                tensor[rows]
                if buffer is None
                else buffer[: rows.stop - rows.start].copy_(tensor[rows], non_blocking=True)
                for tensor, buffer in zip(tensors, rounds[number % len(rounds)], strict=True)
            ]
            return here, streams.mark(streams.bring)

    coming = bring(0)
    for number, rows in enumerate(parts):
        here, arrived = coming
        if number + 1 < len(parts):
            coming = bring(number + 1)
        streams.wait(streams.update(), arrived)
        yield here
        updated = streams.mark(streams.update())
        with streams.use(streams.send):
            streams.wait(streams.send, updated)
            for tensor, part, is_away, is_changed in zip(tensors, here, away, changed, strict=True):
                if is_away and is_changed:
                    tensor[rows].copy_(part, non_blocking=True)
            sent[number % len(rounds)] = streams.mark(streams.send)
    streams.wait(streams.update(), sent[(len(parts) - 1) % len(rounds)])


class Streams(NamedTuple):
    """The three streams; `update` is the caller's."""

    bring: Any
    send: Any
    update: Callable[[], Any]

    @staticmethod
    def use(stream: Any) -> AbstractContextManager[Any]:
        """Within it, `stream` is the current one."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    @staticmethod
    def mark(stream: Any) -> Any:
        """An event after all that `stream` has been given."""
        return None if stream is None else stream.record_event()

    @staticmethod
    def wait(stream: Any, event: Any) -> None:
        """What `stream` is given from here on comes after `event`."""
        if stream is not None:
            stream.wait_event(event)


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """Those of this process for `device`; none on a CPU."""
    if device.type != "cuda":
        return Streams(None, None, lambda: None)
    return Streams(
        torch.cuda.Stream(device),
        torch.cuda.Stream(device),
        functools.partial(torch.cuda.current_stream, device),
    )
