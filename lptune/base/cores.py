"""How many cores this process may use (its affinity, and the limit of its cgroup), and calls in threads."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """CPU time per second that the cgroup allows; None: no limit."""
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):  # cgroup v1
        quota = (CGROUP / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (CGROUP / "cpu" / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def in_threads(calls: Iterable[Callable[[], None]], at_once: int) -> None:
    """Makes the calls in `at_once` threads. After an error no further call begins; the error is raised when
    all running calls have ended.
    """
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(lambda call: call(), calls):
            pass
