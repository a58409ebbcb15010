"""Several ranks of a function, in processes of their own, over gloo on the loopback device."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_ranks(num_ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function(rank, num_ranks, *arguments)` in `num_ranks` processes; raises if one fails.

    `function` is defined at the top of a test module and opens its own `distributed.session`.
    """
    mp.spawn(_rank, args=(num_ranks, free_port(), function, arguments), nprocs=num_ranks, join=True)


def free_port() -> int:
    """One of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a launcher would set for one rank on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(
    rank: int, num_ranks: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= rank_environment(rank, num_ranks, port)
    import torch

    torch.set_num_threads(1)
    function(rank, num_ranks, *arguments)
