"""The arrays of several sources as one array, without a copy: they may be mapped files."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Joined:
    """Several arrays, read like one array. A slice must lie within one of them."""

    def __init__(self, arrays: "Sequence[npt.NDArray[Any] | Joined]") -> None:
        self.dtype: np.dtype[Any] = arrays[0].dtype
        self._arrays = list(arrays)
        self._bounds = np.cumsum([0, *(len(array) for array in arrays)]).tolist()

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, places: slice | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A view for a slice; a copy for an array of `places`, which must not be negative."""
        if isinstance(places, slice):
            number = self._index(places.start)
            base = self._bounds[number]
            assert places.start <= places.stop <= self._bounds[number + 1]
            return self._arrays[number][places.start - base : places.stop - base]
        found = np.empty(len(places), dtype=self.dtype)
        for number in range(self._index(int(places.min())), self._index(int(places.max())) + 1):
            first, stop = self._bounds[number], self._bounds[number + 1]
            here = (places >= first) & (places < stop)
            found[here] = self._arrays[number][places[here] - first]
        return found

    @property
    def num_arrays(self) -> int:
        """Number of arrays that are joined."""
        return len(self._arrays)

    def array_of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each of `places`, the number of the array that holds it. No array is empty."""
        numbers: npt.NDArray[np.int64] = np.searchsorted(self._bounds, places, side="right") - 1
        return numbers

    def _index(self, place: int) -> int:
        """Number of the array that holds `place`; for the end, of the last one."""
        return min(bisect_right(self._bounds, place), len(self._arrays)) - 1
