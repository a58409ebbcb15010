"""Grouped GEMMs on 8-bit operands: E linear layers of one shape, each for a run of rows of x, as the experts
of a mixture are.

Rows are sorted by group: group e has the rows ends[e - 1] ... ends[e]. The weights of all groups are stacked,
(E * N, K), so that a weight is a matrix as every other. How many rows a group has is data, which an op may
look at and the compiler not. On CUDA one kernel serves all groups without a look from the host
(triton/grouped.py); elsewhere the op calls the kernel of one GEMM for each group. An op counts itself once,
however many groups have rows.

    output, grad_input   `grouped_mm`     each group multiplies its rows by its own matrix
    grad_weight          `grouped_outer`  each group contracts over its own rows

The columns that `grouped_outer` contracts are quantized as the device wants them. The tensor cores of a GPU
want them transposed, and each group at a multiple of 128 rows ("in runs").

The products of a group are those of `scaled_mm`, bit for bit. A group without rows multiplies nothing, and
its grad_weight is 0.

Shapes: S rows of all groups, E groups, K in_features, N out_features of one group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lptune.kernels.backend import choose_backend, k_major, triton_kernels
from lptune.kernels.layout import RUN, empty_rows, run_rows, transposed_copy
from lptune.kernels.op import op
from lptune.kernels.quantize import quantize_columns, quantize_rows
from lptune.kernels.record import GRAD_WEIGHT, note
from lptune.kernels.scaled_mm import product
from lptune.numerics import FORMATS, QuantizedColumns, QuantizedRows
from lptune.numerics.formats import INT32_SAFE_CONTRACTION


def _empty_grouped(
    a_SC: Tensor, b_RK: Tensor, ends_E: Tensor, out_dtype: torch.dtype, by_rows: bool
) -> Tensor:
    width = b_RK.shape[0] // ends_E.shape[0] if by_rows else b_RK.shape[1]
    return a_SC.new_empty((a_SC.shape[0], width), dtype=out_dtype)


@op(fake=_empty_grouped)
def grouped_mm(
    a_SC: Tensor,
    b_RK: Tensor,
    scale_a_S1: Tensor,
    scale_b_R1: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
    *,
    by_rows: bool,
    emulate: bool = False,
) -> Tensor:
    """For each group: its rows of a times its matrix of b, transposed if `by_rows`, with the scales applied.

    a_SC: int8 or float8; C is K if `by_rows`, else N. b_RK: (E * N, K), the matrices of all groups.
    scale_a_S1: float32 (S, 1). scale_b_R1: float32 (E * N, 1), only if `by_rows`; None: 1. ends_E: int32, the
    end of each group's rows; the last is S. layer, gemm, emulate: as for `scaled_mm`.
    """
    assert scale_b_R1 is None or by_rows
    if _by_triton(a_SC, a_SC.shape[1], emulate):
        # If not by_rows: the matrices transposed, so that products contract along rows.
        b = b_RK if by_rows else triton_kernels().transposed(b_RK, ends_E.shape[0])
        out: Tensor = triton_kernels().grouped_mm(a_SC, b, scale_a_S1, scale_b_R1, ends_E, out_dtype)
        note(layer, gemm)
        return out
    found = []
    for group, rows, _ in _groups(ends_E):
        size = b_RK.shape[0] // ends_E.shape[0]
        own = slice(group * size, (group + 1) * size)
        b_NK = b_RK[own]
        if by_rows:
            scale_b = None if scale_b_R1 is None else scale_b_R1[own].t()
            b = b_NK.t()
        else:
            scale_b, b = None, transposed_copy(b_NK) if k_major(b_RK.device) else b_NK
        found.append(product(a_SC[rows], b, scale_a_S1[rows], scale_b, out_dtype, gemm, emulate))
    note(layer, gemm)
    return torch.cat(found) if found else _empty_grouped(a_SC, b_RK, ends_E, out_dtype, by_rows)


def _empty_outer(a_SN: Tensor, b_SK: Tensor, ends_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a_SN.new_empty((ends_E.shape[0] * a_SN.shape[1], b_SK.shape[1]), dtype=out_dtype)


@op(fake=_empty_outer)
def grouped_outer(
    a_SN: Tensor,
    b_SK: Tensor,
    scale_a_EN: Tensor,
    scale_b_EK: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    layer: Tensor,
    *,
    most: int | None = None,
    emulate: bool = False,
) -> Tensor:
    """For each group: a.T @ b over its own rows, (E * N, K), with the scales of its columns applied.

    a_SN, scale_a_EN, b_SK, scale_b_EK: of `quantize_grouped_columns` (`in_runs` of other 8-bit columns);
    None: 1. most: no group has more rows; None: a group may have all. ends_E, layer, emulate: as for
    `grouped_mm`.
    """
    if _by_triton(a_SN, len(a_SN) if most is None else most, emulate):
        out_RK: Tensor = triton_kernels().grouped_outer(a_SN, b_SK, scale_a_EN, scale_b_EK, ends_E, out_dtype)
        note(layer, GRAD_WEIGHT)
        return out_RK
    num_groups, size = scale_a_EN.shape
    out_RK = a_SN.new_zeros((num_groups * size, b_SK.shape[1]), dtype=out_dtype)
    for group, _, rows in _groups(ends_E, k_major(a_SN.device)):
        scale_b = None if scale_b_EK is None else scale_b_EK[group, None]
        out_RK[group * size : (group + 1) * size] = product(
            a_SN[rows].t(), b_SK[rows], scale_a_EN[group, :, None], scale_b, out_dtype, GRAD_WEIGHT, emulate
        )
    note(layer, GRAD_WEIGHT)
    return out_RK


def _empty_grouped_columns(x_SK: Tensor, fmt: str, ends_E: Tensor) -> QuantizedColumns:
    num_rows, width, num_groups = *x_SK.shape, ends_E.shape[0]
    in_runs, dtype = k_major(x_SK.device), FORMATS[fmt].dtype
    if in_runs:
        q_SK = x_SK.new_empty((width, run_rows(num_rows, num_groups)), dtype=dtype).t()
    else:
        q_SK = x_SK.new_empty((num_rows, width), dtype=dtype)
    return QuantizedColumns(q_SK, x_SK.new_empty((num_groups, width), dtype=torch.float32))


@op(fake=_empty_grouped_columns)
def quantize_grouped_columns(
    x_SK: Tensor, fmt: str, ends_E: Tensor, *, multiplier_S1: Tensor | None = None, power_of_two: bool = False
) -> QuantizedColumns:
    """`quantize_columns` of each group's rows: q as `grouped_outer` wants it, (S, K) or in runs, and a scale
    for each group and column, (E, K). The scales of a group without rows are 0.
    """
    if choose_backend("quantize", x_SK.device.type) == "triton":
        quantize = triton_kernels().quantize_grouped_columns
        return QuantizedColumns(*quantize(x_SK, fmt, ends_E, multiplier_S1, power_of_two))
    q_SK, scale_EK = _empty_grouped_columns(x_SK, fmt, ends_E)
    scale_EK.zero_()
    q_SK.view(torch.int8).zero_()
    for group, rows, to in _groups(ends_E, k_major(x_SK.device)):
        multiplier = None if multiplier_S1 is None else multiplier_S1[rows]
        q, scale_1K = quantize_columns(x_SK[rows], fmt, multiplier_M1=multiplier, power_of_two=power_of_two)
        q_SK[to], scale_EK[group] = q, scale_1K[0]
    return QuantizedColumns(q_SK, scale_EK)


def _empty_in_runs(q_SK: Tensor, ends_E: Tensor) -> Tensor:
    if not k_major(q_SK.device):
        return torch.empty_like(q_SK)
    num_rows = run_rows(q_SK.shape[0], ends_E.shape[0])
    return q_SK.new_empty((q_SK.shape[1], num_rows)).t()


@op(fake=_empty_in_runs)
def in_runs(q_SK: Tensor, ends_E: Tensor) -> Tensor:
    """A copy of 8-bit columns (S, K), stored row by row, as `grouped_outer` wants them."""
    out = _empty_in_runs(q_SK, ends_E)
    if not k_major(q_SK.device):
        return out.copy_(q_SK)
    # Without a look at the sizes: to each row goes the number of its group's first run.
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    runs_E = (sizes_E + RUN - 1) // RUN
    shift_E = (runs_E.cumsum(0) - runs_E) * RUN - (ends_E - sizes_E)
    to_S = torch.arange(len(q_SK), device=q_SK.device)
    to_S += shift_E[group_of_rows(ends_E, len(q_SK))]
    out.view(torch.int8).zero_()
    out.view(torch.int8)[to_S] = q_SK.view(torch.int8)
    return out


def _empty_grouped_rows(x_SK: Tensor, fmt: str) -> QuantizedRows:
    return empty_rows(x_SK, fmt)


@op(fake=_empty_grouped_rows)
def quantize_grouped_rows(
    x_SK: Tensor, fmt: str, multiplier_EK: Tensor, ends_E: Tensor, *, power_of_two: bool = False
) -> QuantizedRows:
    """`quantize_rows` of x_SK, each row times the multiplier (float32) of its group. x_SK: contiguous."""
    if choose_backend("quantize", x_SK.device.type) == "triton":
        quantize = triton_kernels().quantize_rows
        return QuantizedRows(*quantize(x_SK, multiplier_EK, fmt, power_of_two, False, ends_E=ends_E))
    folded_SK = x_SK.float() * multiplier_EK[group_of_rows(ends_E, len(x_SK))]
    return quantize_rows(folded_SK, fmt, power_of_two=power_of_two)


def _by_triton(a: Tensor, contraction: int, emulate: bool) -> bool:
    """Whether one kernel serves all groups. contraction: at most so many products are summed."""
    if a.dtype == torch.int8 and contraction > INT32_SAFE_CONTRACTION:
        return False
    operation = "int8_gemm" if a.dtype == torch.int8 else "float8_other_gemm"
    return not emulate and choose_backend(operation, a.device.type) == "triton"


def _groups(ends_E: Tensor, in_runs: bool = False) -> Iterator[tuple[int, slice, slice]]:
    """The number and the rows of each group that has rows; and its rows again, or where they are in runs."""
    start = run = 0
    for group, end in enumerate(ends_E.tolist()):
        first = run if in_runs else start
        if end > start:
            yield group, slice(start, end), slice(first, first + end - start)
        run += -(-(end - start) // RUN) * RUN
        start = end


def group_of_rows(ends_E: Tensor, num_rows: int) -> Tensor:
    """The group of each row (S,), int64."""
    return torch.searchsorted(ends_E, torch.arange(num_rows, device=ends_E.device), right=True)
