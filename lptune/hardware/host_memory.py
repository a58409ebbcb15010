"""How much memory the host has; and keeping what a step has freed for the next step, on a CPU.

glibc maps each block of more than 32 MB anew, unmaps it when it is freed, and gives the free end of its heap
back. So each step gets its gradients and activations as pages that the kernel must fill with zeros first. On
GPUs torch has an allocator that keeps what was freed; on a CPU it calls malloc.

`mallopt` makes glibc take all blocks from its heap, and keep the heap. The process then stays as large as it
once was, and a heap of large blocks has gaps. With two layers of width 2,048
(benchmarks/step.py --variant int8_rowcol --rounds 8) the system time of the run fell from 6.9 to 2.9 s, and
the memory at its peak grew by 4 % (docs/log.md).
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

from lptune.base import cores

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_GROW_BY = 64 * 2**20  # bytes that the heap grows by in addition, so that it grows seldom


def keep_freed_memory() -> bool:
    """Applies to this process from now on; returns whether it did.

    It does not where malloc is not glibc's, or where the environment has settings for it: MALLOC_*,
    GLIBC_TUNABLES, LD_PRELOAD. MALLOC_MMAP_MAX_=65536 is glibc's default, and so switches this off.
    """
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    if sys.platform != "linux" or any(name.startswith(own) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # musl has a malloc of its own
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _GROW_BY))
    done = [library.mallopt(name, value) for name, value in settings]
    return all(done)


def cgroup_limit() -> int | None:
    """Bytes that the cgroup allows; None: no limit."""
    for file in (cores.CGROUP / "memory.max", cores.CGROUP / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int(file.read_text())
    return None


def available_bytes() -> int | None:
    """Bytes that programs can still get, with swap, and no more than the cgroup allows to all of its
    processes; None where the kernel does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free = 1024 * (found["MemAvailable"] + found.get("SwapFree", 0))
    except (OSError, KeyError):  # not Linux
        return None
    return min(free, cgroup_limit() or free)
