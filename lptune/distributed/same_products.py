"""Before a run: does every rank multiply alike?

A GPU with a defect may compute wrong numbers without an error. Its gradients are then averaged into all
others, and the loss tells nothing for a long time. A product of INT8 matrices in INT32 is exact, so it has
the same bits on every sound device, of any make. Each rank computes one that keeps the whole device busy for
an instant, and all compare a digest of it. A defect that shows rarely, or only when the device is hot, is not
found so.
"""

import socket
from collections import Counter

import torch

from lptune.base.errors import UserError
from lptune.distributed.session import World

_SIZE, _CPU_SIZE = 4096, 128
_MODULUS = 2**31 - 1


def check_products(world: World) -> None:
    """Raises UserError with the ranks, and their machines, whose product differs from that of most others. A
    collective; one rank has nothing to compare.
    """
    if world.size == 1:
        return
    told = world.gather([socket.gethostname(), _digest(world.device)])
    by_digest = Counter(digest for _, digest in told)
    if len(by_digest) == 1:
        return
    (usual, count), (_, next_count) = by_digest.most_common(2)
    is_known = count > next_count
    wrong = [
        f"{rank} ({host})" for rank, (host, digest) in enumerate(told) if digest != usual or not is_known
    ]
    raise UserError(
        f"rank{'s' * (len(wrong) > 1)} {', '.join(wrong[:8])}{', …' * (len(wrong) > 8)}: an exact product of "
        f"INT8 matrices has other bits than "
        f"{f'on {count} of {world.size} ranks' if is_known else 'on each other'}: a device is faulty; leave "
        "it out, and test it before it is used again"
    )


def _digest(device: torch.device) -> int:
    size = _CPU_SIZE if device.type == "cpu" else _SIZE
    index = torch.arange(size * size, dtype=torch.int32, device=device)
    values = ((index * 40504) % 255 - 127).to(torch.int8).view(size, size)
    product = torch._int_mm(values, values.t()).to(torch.int64).flatten()
    # Sums of INT64 wrap, and do so alike in any order.
    return int((product * (index.to(torch.int64) % 8191 + 1)).sum()) % _MODULUS
