"""Quantizers that round stochastically, with the random bits of `numerics.uniform`.

    rows             x is read once, by programs that hold whole rows (by_row.py)
    columns, tensor  x is read twice, by the two phases of quantize.py

Ran on an H100 (docs/gpu.md); for other GPUs interpreted, and compiled ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.by_row import quantize_rows
from lptune.kernels.triton.formats import uniform
from lptune.kernels.triton.quantize import NOT_SPECIALIZED, in_two_phases


def quantize_rows_stochastic(
    x_MK: Tensor,
    multiplier_1K: Tensor | None,
    fmt: str,
    power_of_two: bool,
    key: int,
    first: int,
    before: tuple[Tensor, Tensor] | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of `x * multiplier`, by one pass over x, which is stored row by row. key, first: as for
    `quantize_stochastic` in lptune.kernels.

    before: q and scale that are the results where `found_inf`, float32 with one element, is 1.
    """
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    return quantize_rows(
        x_MK,
        multiplier_1K,
        fmt,
        power_of_two,
        False,
        random=(key, first),
        before=before,
        found_inf=found_inf,
    )


def quantize_stochastic(
    x_MK: Tensor,
    multiplier: Tensor | None,
    fmt: str,
    power_of_two: bool,
    dim: int,
    key: int,
    first: int,
    transposed: bool,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, q again). dim, key, first: as for `quantize_stochastic` in lptune.kernels.

    transposed: q is stored column by column. twice: of a tensor, q is stored row by row, and q again column
    by column; else the last result is empty.
    """
    if dim == 1:
        q, scale = quantize_rows(x_MK, multiplier, fmt, power_of_two, transposed, random=(key, first))
        return q, scale, q[:0]
    is_columns = dim == 0
    how, random = (transposed or twice, twice), (key, first)
    q, scale, column_q, column_scale = in_two_phases(
        x_MK, fmt, power_of_two, int(not is_columns), is_columns, None, multiplier, *how, random
    )
    return (column_q, column_scale, q) if is_columns else (q, scale, column_q)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def bfloat16_kernel(x_ptr, out_ptr, key, first, N, BLOCK: tl.constexpr):
    """Rounds a block of N elements to bfloat16: one pass, bits in registers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.int32, bitcast=True)
    # The upper half of the bits is the neighbour towards zero, the lower one the distance from it, in steps.
    distance = (bits & 0xFFFF).to(tl.float32) * 1.52587890625e-5  # 2**-16
    up = tl.where(uniform(key.to(tl.int64), at + first) < distance, 0x10000, 0)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = tl.where(is_nan, bits | 0x400000, bits + up) >> 16
    tl.store(out_ptr + at, rounded.to(tl.int16), mask=at < N)


def round_to_bfloat16(x_MK: Tensor, key: int, first: int) -> Tensor:
    """`lptune.kernels.round_to_bfloat16` of a tensor of any shape, in one pass."""
    x, n, block = x_MK.contiguous(), x_MK.numel(), 1024
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    tensors = (x, out.view(torch.int16))
    launch_key = ("bfloat16", x.get_device(), n)
    if n and not again.again(launch_key, tensors, (key, first)):
        grid = (triton.cdiv(n, block),)
        made = Launch(bfloat16_kernel, grid, 2, (n,), {"BLOCK": block}, 4, num_varying=2)
        again.first(launch_key, [made], tensors, (key, first))
    return out
