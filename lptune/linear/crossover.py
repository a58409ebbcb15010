"""Measured layer sizes from which a kind is faster than bf16, for `precision.skip_small`.

Quantizing costs memory traffic, since it reads and writes the operands; an 8-bit GEMM saves arithmetic. Which
of the two is larger depends on the number of tokens, the layer's sizes, the kind and the device.
`benchmarks/crossover.py` times forward and backward of a compiled layer over a grid of sizes and writes
crossover.json. Between grid points, the logarithm of the speed-up is interpolated linearly in the logarithms
of the sizes. Outside of the grid, the nearest edge of the grid is used.
"""

import functools
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("crossover.json")


@dataclass(frozen=True)
class Measurements:
    """Speed-ups of one kind over bf16 on one device, on a grid of sizes. Each of the sizes ascends."""

    device: str
    tokens: tuple[int, ...]
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    speedup: Sequence[Any]
    """Nested lists, indexed by tokens, in_features, out_features."""

    def at(self, tokens: int, in_features: int, out_features: int) -> float:
        """Interpolated speed-up over bf16, of forward and backward of one layer of these sizes."""
        weights: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for size, grid in (
            (tokens, self.tokens),
            (in_features, self.in_features),
            (out_features, self.out_features),
        ):
            weights = [
                ((*index, i), weight * share)
                for index, weight in weights
                for i, share in _neighbours(size, grid)
            ]
        return math.exp(sum(weight * math.log(self._point(index)) for index, weight in weights if weight))

    def _point(self, index: tuple[int, ...]) -> float:
        value: Any = self.speedup
        for i in index:
            value = value[i]
        return float(value)


def measurements(kind: str, device_type: str) -> Measurements | None:
    """The measurements of `kind` on this type of device ("cpu", "cuda"); None if there are none."""
    device = _read().get(device_type)
    if device is None or kind not in device["speedup"]:
        return None
    tokens, inputs, outputs = (tuple(device[key]) for key in ("tokens", "in_features", "out_features"))
    return Measurements(device["device"], tokens, inputs, outputs, device["speedup"][kind])


def published_as_small(one_scale: bool, in_features: int, out_features: int) -> bool:
    """Whether torchao's published filter for H100 keeps a layer of this size in bf16, because float8 training
    would be no faster. The filter ignores the number of tokens. Used where crossover.json has no measurement.

    one_scale: whether the kind has one scale per tensor; False for finer scales.
    """
    if one_scale:
        return in_features <= 4096 and out_features <= 1024
    return out_features <= 2048 or in_features <= 1024 or (out_features <= 4096 and in_features <= 2048)


def _neighbours(size: int, grid: tuple[int, ...]) -> list[tuple[int, float]]:
    """The indices of the grid points around `size`, with interpolation weights that add up to 1."""
    upper = bisect_right(grid, size)
    if upper == 0 or upper == len(grid):
        return [(min(upper, len(grid) - 1), 1.0)]
    low, high = grid[upper - 1], grid[upper]
    share = math.log(size / low) / math.log(high / low)
    return [(upper - 1, 1 - share), (upper, share)]


@functools.cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8")) if _FILE.exists() else {}
    return found
