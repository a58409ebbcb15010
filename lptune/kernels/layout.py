"""Results of quantizers: how 8-bit values are stored, and empty results by what shares a scale (fakes).

Values are stored row by row, or column by column (`transposed`), as a GEMM that contracts rows wants them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lptune.numerics import (
    FORMATS,
    QuantizedBlocks,
    QuantizedColumns,
    QuantizedRows,
    QuantizedTensor,
)

RUN = 128
"""The rows of a step of a contraction (triton/grouped.py)."""


def stored(q_MK: Tensor, transposed: bool = False) -> Tensor:
    """`q_MK` stored row by row, or if `transposed` column by column; itself if it is stored so."""
    return transposed_copy(q_MK) if transposed else q_MK.contiguous()


def run_rows(num_rows: int, num_groups: int) -> int:
    """The most rows that `num_rows` of so many groups take if each group begins at a multiple of RUN."""
    return (num_rows + num_groups * (RUN - 1)) // RUN * RUN


def transposed_copy(q_MK: Tensor) -> Tensor:
    """A copy of `q_MK` that is stored column by column, for values that were stored row by row."""
    return q_MK.t().contiguous().t()


def stored_by_columns(q_MK: Tensor) -> Tensor:
    """As `transposed_copy`, but always a tensor of its own: results of an op are separate, also where nothing
    needs to move.
    """
    return q_MK.t().clone(memory_format=torch.contiguous_format).t()


def empty_q(x_MK: Tensor, fmt: str, transposed: bool = False) -> Tensor:
    """The values of `x_MK` in 8 bits, (M, K)."""
    dtype = FORMATS[fmt].dtype
    return (
        x_MK.new_empty(x_MK.shape[::-1], dtype=dtype).t()
        if transposed
        else x_MK.new_empty(x_MK.shape, dtype=dtype)
    )


def empty_rows(x_MK: Tensor, fmt: str, transposed: bool = False) -> QuantizedRows:
    """`x_MK` with one scale per row."""
    return QuantizedRows(empty_q(x_MK, fmt, transposed), _scale(x_MK, x_MK.shape[0], 1))


def empty_columns(x_MK: Tensor, fmt: str, transposed: bool = False) -> QuantizedColumns:
    """`x_MK` with one scale per column."""
    return QuantizedColumns(empty_q(x_MK, fmt, transposed), _scale(x_MK, 1, x_MK.shape[1]))


def empty_tensor(x_MK: Tensor, fmt: str, transposed: bool = False) -> QuantizedTensor:
    """`x_MK` with one scale for all of it."""
    return QuantizedTensor(empty_q(x_MK, fmt, transposed), _scale(x_MK, 1, 1))


def empty_tensor_both_ways(x_MK: Tensor, fmt: str) -> tuple[QuantizedTensor, Tensor]:
    """`empty_tensor` stored row by row, and its q_MK again, stored column by column."""
    return empty_tensor(x_MK, fmt), empty_q(x_MK, fmt, transposed=True)


def empty_blocks(
    x_MK: Tensor, block: Sequence[int], fmt: str, e8m0: bool = False, transposed: bool = False
) -> QuantizedBlocks:
    """`x_MK` with one scale per block of `block` (rows, columns)."""
    # Rounded up: the last blocks may be smaller.
    shape = [-(-size // of) for size, of in zip(x_MK.shape, block, strict=True)]
    scale = x_MK.new_empty(shape, dtype=torch.float8_e8m0fnu if e8m0 else torch.float32)
    return QuantizedBlocks(empty_q(x_MK, fmt, transposed), scale)


def _scale(x_MK: Tensor, *shape: int) -> Tensor:
    return x_MK.new_empty(shape, dtype=torch.float32)
