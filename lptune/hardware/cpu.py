"""What /proc/cpuinfo says of the first processor: its name, and the instruction sets that it has."""

import functools
from pathlib import Path


@functools.cache
def cpuinfo() -> dict[str, str]:
    """Key -> value, as in `"model name": "AMD EPYC 7B13"`; empty where there is no /proc/cpuinfo."""
    try:
        first, *_ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> frozenset[str]:
    """The names of the features of the processor, such as `avx2` (x86) or `asimddp` (ARM)."""
    return frozenset((cpuinfo().get("flags") or cpuinfo().get("Features", "")).split())
