"""Does every rank multiply alike, and as fast as the others? Asked before a run, and before each checkpoint.

A GPU with a defect may compute wrong numbers without an error. Its gradients are then averaged into all
others, and the loss tells nothing for a long time. A product of INT8 matrices in INT32 is exact, so it has
the same bits on every sound device, of any make. Each rank computes one that keeps the whole device busy for
an instant, and all compare a digest of it. A defect that shows rarely is not found so. One that begins while
the run trains is found before the next checkpoint, so those that were written are of sound devices.

A step takes as long as on its slowest rank: a GPU that is hot, throttled or shared with another job slows all
down. So the same product is timed on GPUs, and those that take longer than the median are named.
"""

import socket
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from lptune.base.errors import UserError
from lptune.distributed.session import World

_SIZE, _CPU_SIZE = 4096, 128
_ROUNDS = 50
_SLOW = 1.2


def check_products(world: World, trained: str = "") -> None:
    """Raises UserError with the ranks, and their machines, whose product differs from that of most others;
    prints those whose GPU is slow. A collective; one rank has nothing to compare.

    trained: which steps a faulty device may have spoilt, for the message.
    """
    if world.size == 1:
        return
    told = world.gather([socket.gethostname(), *product(world.device)])
    check(told, trained)
    for line in slow(told):
        world.print(line)


def check(told: Sequence[tuple[str, int, float]], trained: str = "") -> None:
    """Raises UserError as `check_products` does. told: of each rank machine, digest and milliseconds."""
    by_digest = Counter(digest for _, digest, _ in told)
    if len(by_digest) == 1:
        return
    (usual, count), (_, next_count) = by_digest.most_common(2)
    is_known = count > next_count
    wrong = {rank: host for rank, (host, digest, _) in enumerate(told) if digest != usual or not is_known}
    raise UserError(
        f"{_names(wrong)}: an exact product of INT8 matrices has other bits than "
        f"{f'on {count} of {len(told)} ranks' if is_known else 'on each other'}: a device is faulty; leave "
        f"it out, and test it before it is used again{trained}"
    )


def slow(told: Sequence[tuple[str, int, float]]) -> Iterator[str]:
    """A line if devices were slower than the median by more than a fifth. told: as of `check`."""
    median = statistics.median(ms for _, _, ms in told)
    found = {rank: host for rank, (host, _, ms) in enumerate(told) if ms > _SLOW * median}
    if found:
        worst = max(ms for _, _, ms in told) / median
        yield (
            f"note: {_names(found)}: a GPU multiplies {worst:.1f} times as long as the median, and each step "
            "waits for it; is it hot, throttled, or shared?"
        )


def _names(ranks: Mapping[int, str]) -> str:
    shown = [f"{rank} ({host})" for rank, host in ranks.items()][:8]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}{', …' * (len(ranks) > 8)}"


def product(device: torch.device) -> tuple[int, float]:
    """(a digest of the exact product, and on a GPU the milliseconds of one of several, else 0)."""
    size = _CPU_SIZE if device.type == "cpu" else _SIZE
    place = torch.arange(size, dtype=torch.int32, device=device)
    rows, columns = ((place * factor % 255).to(torch.int16) for factor in (1871, 40504))
    values = ((rows[:, None] + columns) % 255 - 127).to(torch.int8)
    product = torch._int_mm(values, values.t())
    # In place, since a run that trains has little memory left. INT32 wraps, and does so alike in any order.
    # The weights are odd, so that no wrong bit of an element is multiplied away.
    product *= (2 * place + 1)[:, None]
    product *= 2 * place + 1
    digest = int(product.sum(dtype=torch.int32))
    if device.type == "cpu":  # where ranks share the cores
        return digest, 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        for _ in range(_ROUNDS):  # those before `begin` warm up
            torch._int_mm(values, values.t())
        event.record()
    torch.cuda.synchronize(device)
    return digest, begin.elapsed_time(end) / _ROUNDS
