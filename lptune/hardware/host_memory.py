"""Keeps the memory that a step has freed, for the next step. For training on a CPU.

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
