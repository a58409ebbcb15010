"""How 8-bit values are stored: row by row, or column by column, as a GEMM that contracts rows wants them."""

import torch
from torch import Tensor

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
