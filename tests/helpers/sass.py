"""The loop over the contraction of a GEMM in Hopper's machine code (SASS), as nvdisasm prints it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"

_KINDS = {
    "product": r"\b[IQ]GMMA\.",
    # Waits until no group of products is pending; a number above 0 lets so many groups run on.
    "full wait": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b",
    "partial wait": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9a-f]",
    "barrier": r"\bBAR\.SYNC",  # of all threads of the program
    "load": r"\bUTMALDG|\bLDGSTS",  # starts a load into shared memory: by TMA a tile, else 16 bytes a thread
    "wait for load": r"SYNCS\.PHASECHK|(?<!WARPGROUP\.)DEPBAR\.LE SB0",
    "addition": r"\bFADD\b",
    "store": r"\bSTG\b",
    "store of 16 bytes": r"\bSTG\.E\.128\b",
    "label": r"^\.L_x",
    "branch": r"\bBRA\b",
}


class Loop(NamedTuple):
    """One step of the loop, in the order of execution, without the epilogue that ends a tile."""

    instructions: tuple[str, ...]  # keys of _KINDS
    product_cycles: int
    """Cycles that the tensor cores of a processor take for the products of one group of 4 warps."""

    def count(self, kind: str) -> int:
        """How many instructions of `kind` a step has."""
        return self.instructions.count(kind)

    @property
    def loads_follow_the_wait(self) -> bool:
        """Whether a step starts its loads only when all its products are done."""
        return self.instructions.index("full wait") < self.instructions.index("load")


def count(cubin: bytes, kind: str) -> int:
    """How many instructions of `kind` a kernel has. Skips the test if nvdisasm is missing."""
    return sum(each == kind for each, _ in _instructions(cubin))


def _instructions(cubin: bytes) -> list[tuple[str, str]]:
    if not NVDISASM.exists():
        pytest.skip(f"this Triton brings no {NVDISASM.name}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [
        (kind, line)
        for line in text.splitlines()
        for kind, pattern in _KINDS.items()
        if re.search(pattern, line.strip())
    ]


def main_loop(cubin: bytes) -> Loop:
    """The loop that has the products. Skips the test if nvdisasm is missing."""
    found = _instructions(cubin)
    kinds = [kind for kind, _ in found]
    first = kinds.index("product")
    start = first - kinds[first::-1].index("label")
    # After the last product and a load, the next branch skips the epilogue.
    last = len(kinds) - 1 - kinds[::-1].index("product")
    loads = [index for index, kind in enumerate(kinds) if kind == "load" and index > last]
    end = kinds.index("branch", max(index for index in loads if "label" not in kinds[last:index]))
    shapes = [re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", line) for kind, line in found if kind == "product"]
    # 4,096 products of 8-bit numbers in a cycle: 1,979 TFLOP/s (data sheet), 132 processors, 1.83 GHz.
    multiplied = sum(int(m[1]) * int(m[2]) * int(m[3]) for m in shapes if m)
    return Loop(tuple(kinds[start + 1 : end]), multiplied // 4096)
