"""Grouped GEMMs and the quantizer by columns of groups: one launch for all groups, and no look at their sizes
from the host.

How many rows a group has is data on the device. So a launch has as many programs as any sizes can need, and
a program finds its group by itself: of the S rows, group e has cdiv(rows of e, BLOCK_M) tiles, and a program
whose tile is beyond the last one ends. The contraction of `grouped_outer` begins at any row, so its operands
are loaded at multiples of 16 before it, and what belongs to another group is made 0.

The bits are those of gemm.py and quantize.py for each group.

Not run on a GPU yet: interpreted, and compiled ahead of time without spills.

Shapes: S rows, E groups, K and N sizes of a matrix, R = E * N.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import magnitude_bits, round_to, scale_from_amax
from lptune.kernels.triton.gemm import k_major
from lptune.kernels.triton.quantize import vector
from lptune.numerics import FORMATS

_ALIGNMENT = 16


class GroupedConfig(NamedTuple):
    """Launch parameters of a grouped GEMM."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


CONFIGS = (
    GroupedConfig(128, 128, 128, 8, 3),
    GroupedConfig(64, 128, 128, 4, 3),
    GroupedConfig(128, 128, 64, 8, 4),
    GroupedConfig(64, 64, 128, 4, 3),
)
"""The last one fits every device. All steps of float8 must have one length (`_run`)."""

_COLUMNS, _ROWS = 64, 32  # of a tile of the quantizer


@triton.jit
def bounds_of(ends_ptr, group):
    """The first row of a group, and the end of its rows."""
    start = tl.load(ends_ptr + tl.maximum(group - 1, 0))
    return tl.where(group > 0, start, 0), tl.load(ends_ptr + group)


@triton.jit
def rows_of_tile(ends_ptr, tile, E, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, its end, first row) of tile number `tile`; the end is 0 if there are fewer tiles."""
    groups = tl.arange(0, GROUPS)
    inside = groups < E
    ends = tl.load(ends_ptr + groups, mask=inside, other=0)
    starts = tl.load(ends_ptr + groups - 1, mask=inside & (groups > 0), other=0)
    tiles = tl.where(inside, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    after = tl.cumsum(tiles, 0)
    before = after - tiles
    mine = inside & (before <= tile) & (tile < after)
    group = tl.sum(tl.where(mine, groups, 0))
    end = tl.sum(tl.where(mine, ends, 0))
    return group, end, tl.sum(tl.where(mine, starts + (tile - before) * BLOCK_M, 0))


@triton.jit
def grouped_mm_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    ends_ptr,
    E,
    N,
    K,
    stride_a,
    stride_b,
    HAS_SCALE_B: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a: (S, K), b: (E * N, K), out: (S, N), all row by row. Group e has the rows of b from e * N on."""
    IS_INT8: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACCUMULATOR: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    group, end, start = rows_of_tile(ends_ptr, tile_m, E, GROUPS, BLOCK_M)
    if start < end:
        rows, columns = start + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)[None, :]
        # Rows beyond the end are other rows: their results are not stored, and no mask is needed.
        a_rows = a_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * stride_a + inner
        of_b = group.to(tl.int64) * N + tl.minimum(columns, N - 1)
        b_rows = b_ptr + of_b[:, None] * stride_b + inner
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
        for start_k in range(0, K, BLOCK_K):
            inside = inner < K - start_k
            a_tile = tl.load(a_rows + start_k, mask=inside, other=0.0)
            b_tile = tl.load(b_rows + start_k, mask=inside, other=0.0)
            acc = tl.dot(
                a_tile, b_tile.T, acc, out_dtype=ACCUMULATOR, max_num_imprecise_acc=0 if IS_INT8 else BLOCK_K
            )
        scaled = acc.to(tl.float32) * tl.load(scale_a_ptr + rows, mask=rows < end, other=0.0)[:, None]
        if HAS_SCALE_B:
            scaled = scaled * tl.load(scale_b_ptr + of_b)[None, :]
        at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, scaled.to(out_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def grouped_outer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    ends_ptr,
    N,
    K,
    stride_a,
    stride_b,
    HAS_SCALE_B: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a: (N, S'), b: (K, S'), row by row, with room for a step after the last row. out: (E * N, K)."""
    IS_INT8: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACCUMULATOR: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    group = tl.program_id(1)
    start, end = bounds_of(ends_ptr, group)
    tiles_k = tl.cdiv(K, BLOCK_N)
    rows = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)[None, :]
    a_rows = a_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_a + inner
    b_rows = b_ptr + tl.minimum(columns, K - 1).to(tl.int64)[:, None] * stride_b + inner
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    for step in range(tl.cdiv(end - start // ALIGNMENT * ALIGNMENT, BLOCK_K)):
        at = tl.multiple_of((start // ALIGNMENT + step * (BLOCK_K // ALIGNMENT)) * ALIGNMENT, ALIGNMENT)
        mine = (at + inner >= start) & (at + inner < end)
        # As bytes: 0 in every format.
        a_tile = tl.where(mine, tl.load(a_rows + at).to(tl.int8, bitcast=True), 0)
        b_tile = tl.where(mine, tl.load(b_rows + at).to(tl.int8, bitcast=True), 0)
        acc = tl.dot(
            a_tile.to(a_ptr.dtype.element_ty, bitcast=True),
            b_tile.to(b_ptr.dtype.element_ty, bitcast=True).T,
            acc,
            out_dtype=ACCUMULATOR,
            max_num_imprecise_acc=0 if IS_INT8 else BLOCK_K,
        )
    scale_a = tl.load(scale_a_ptr + group.to(tl.int64) * N + rows, mask=rows < N, other=0.0)
    scaled = acc.to(tl.float32) * scale_a[:, None]
    if HAS_SCALE_B:
        scale_b = tl.load(scale_b_ptr + group.to(tl.int64) * K + columns, mask=columns < K, other=0.0)
        scaled = scaled * scale_b[None, :]
    scaled = tl.where(start < end, scaled, 0.0)
    to = out_ptr + (group.to(tl.int64) * N + rows)[:, None] * K + columns[None, :]
    tl.store(to, scaled.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & (columns < K)[None, :])


@triton.jit
def grouped_columns_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    ends_ptr,
    K,
    stride_s,
    stride_k,
    MULTIPLY: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """q (S, K) row by row, and scales (E, K): columns of x * multiplier (S), within the rows of a group."""
    group = tl.program_id(1)
    start, end = bounds_of(ends_ptr, group)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_s + columns.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if MULTIPLY:
            x = x * tl.load(multiplier_ptr + rows, mask=rows < end, other=0.0)[:, None]
        bits = magnitude_bits(x)
        largest = tl.where(bits > largest, bits, largest)
    scale, inverse = scale_from_amax(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
    tl.store(scale_ptr + group.to(tl.int64) * K + columns, scale, mask=columns < K)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_s + columns.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if MULTIPLY:
            x = x * tl.load(multiplier_ptr + rows, mask=rows < end, other=0.0)[:, None]
        q = round_to(x * inverse[None, :], FORMAT, MAX, HARDWARE_FLOAT8)
        tl.store(q_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], q, mask=inside)


def grouped_mm(
    a_SK: Tensor,
    b_RK: Tensor,
    scale_a_S1: Tensor,
    scale_b_R1: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    config: GroupedConfig | None = None,
) -> Tensor:
    """`kernels.grouped_mm` with by_rows. config: overrides the choice of autotuning."""
    (num_rows, k), num_groups = a_SK.shape, len(ends_E)
    n = b_RK.shape[0] // num_groups
    out_SN = torch.empty(num_rows, n, dtype=out_dtype, device=a_SK.device)
    if out_SN.numel() == 0 or k == 0:
        return out_SN.zero_()
    a, b = k_major(a_SK), k_major(b_RK)
    scales = (scale_a_S1.contiguous(), vector(scale_b_R1, scale_a_S1))
    tensors = (a, b, out_SN, *scales, ends_E)

    def launch_by(each: GroupedConfig) -> Launch:
        # Each group may have a tile that is not full.
        tiles_m = triton.cdiv(num_rows, each.block_m) + num_groups
        return Launch(
            grouped_mm_kernel,
            (tiles_m * triton.cdiv(n, each.block_n),),
            len(tensors),
            (num_groups, n, k, a.stride(0), b.stride(0)),
            {
                "HAS_SCALE_B": scale_b_R1 is not None,
                "GROUPS": triton.next_power_of_2(num_groups),
                "BLOCK_M": each.block_m,
                "BLOCK_N": each.block_n,
                "BLOCK_K": each.block_k,
            },
            each.num_warps,
            each.num_stages,
        )

    name = f"grouped_mm {a.dtype} {out_dtype} E={num_groups} M~{launch.bucket(num_rows)} N={n} K={k}"
    _run(name, launch_by, tensors, config)
    return out_SN


def grouped_outer(
    a_SN: Tensor,
    b_SK: Tensor,
    scale_a_EN: Tensor,
    scale_b_EK: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    config: GroupedConfig | None = None,
) -> Tensor:
    """`kernels.grouped_outer`. Copies both operands, turned, as its products want them."""
    (num_groups, n), k = scale_a_EN.shape, b_SK.shape[1]
    out_RK = torch.empty(num_groups * n, k, dtype=out_dtype, device=a_SN.device)
    if out_RK.numel() == 0:
        return out_RK
    longest = max(each.block_k for each in CONFIGS)
    room = longest + -len(a_SN) % _ALIGNMENT
    a, b = (F.pad(each.view(torch.int8).t(), (0, room)).view(each.dtype) for each in (a_SN, b_SK))
    tensors = (a, b, out_RK, scale_a_EN.contiguous(), vector(scale_b_EK, scale_a_EN), ends_E)

    def launch_by(each: GroupedConfig) -> Launch:
        return Launch(
            grouped_outer_kernel,
            (triton.cdiv(n, each.block_m) * triton.cdiv(k, each.block_n), num_groups),
            len(tensors),
            (n, k, a.stride(0), b.stride(0)),
            {
                "HAS_SCALE_B": scale_b_EK is not None,
                "ALIGNMENT": _ALIGNMENT,
                "BLOCK_M": each.block_m,
                "BLOCK_N": each.block_n,
                "BLOCK_K": each.block_k,
            },
            each.num_warps,
            each.num_stages,
        )

    name = f"grouped_outer {a.dtype} {out_dtype} E={num_groups} N={n} K={k} S~{launch.bucket(len(a_SN))}"
    _run(name, launch_by, tensors, config)
    return out_RK


def _run(
    name: str,
    launch_by: Callable[[GroupedConfig], Launch],
    tensors: tuple[Tensor, ...],
    config: GroupedConfig | None,
) -> None:
    if config is None:
        # All steps of float8 have one length, so that no configuration changes a bit.
        found = [each for each in CONFIGS if each.block_k == 128 or tensors[0].dtype == torch.int8]
        config = launch.tuned(name, found, lambda each: launch_by(each).run(tensors), tensors[0].device)
    launch_by(config).run(tensors)


def quantize_grouped_columns(
    x_SK: Tensor, fmt: str, ends_E: Tensor, multiplier_S1: Tensor | None, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`kernels.quantize_grouped_columns`. Reads x twice: for a group's amaxes, then for its values."""
    (num_rows, k), num_groups, device = x_SK.shape, len(ends_E), x_SK.device
    q_SK = torch.empty(num_rows, k, dtype=torch.int8, device=device)
    scale_EK = torch.empty(num_groups, k, dtype=torch.float32, device=device)
    tensors = (x_SK, vector(multiplier_S1, x_SK), q_SK, scale_EK, ends_E)
    if k:
        Launch(
            grouped_columns_kernel,
            (triton.cdiv(k, _COLUMNS), num_groups),
            len(tensors),
            (k, *x_SK.stride()),
            {
                "MULTIPLY": multiplier_S1 is not None,
                "FORMAT": launch.rounding(fmt),
                "MAX": FORMATS[fmt].max,
                "POWER_OF_TWO": power_of_two,
                "HARDWARE_FLOAT8": launch.rounds_float8(device),
                "BLOCK_M": _ROWS,
                "BLOCK_K": _COLUMNS,
            },
            4,
        ).run(tensors)
    return q_SK.view(FORMATS[fmt].dtype), scale_EK
