"""Quantizers as custom ops: they make the operands of 8-bit GEMMs.

On every device and with every backend, an op gives the same bits as the function of the same name in
`lptune.numerics`; backends differ in how often they read x. An op is opaque to torch.compile (op.py), so
compiled and eager runs quantize alike by construction.

`multiplier` folds the scales of another operand in before quantization (lptune/linear/kinds/rowwise.py): rows
of `x * multiplier_1K`, columns of `x * multiplier_M1`, with the product rounded to float32.

`transposed` stores the values column by column; the result has the same shape and other strides. Tensor cores
want both operands of an 8-bit GEMM contiguous along the contraction ("K-major"; another layout costs 1.5x to
2.6x on Hopper). The cheapest moment to transpose a matrix is when it is written.

`rounded_to` rounds x to another dtype first: weights are quantized from the compute dtype, and masters are
float32. Kernels round in registers, where a separate cast would write a copy and read it again.

`rotated` rotates rows by Hadamard blocks first (lptune/numerics/rotation.py), in the cache or in the
registers that hold the row.

`quantize_packed_rows` writes rows and scales into the buffer that ranks exchange (packed_rows.py). Quantizers
by an amax that is known before are in by_amax.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.layout import (
    empty_blocks,
    empty_columns,
    empty_rows,
    empty_tensor,
    empty_tensor_both_ways,
    stored,
    stored_by_columns,
)
from lptune.kernels.op import op
from lptune.kernels.packed_rows import HEADER_BYTES, empty_buffer, pack_rows
from lptune.numerics import (
    FORMATS,
    QuantizedBlocks,
    QuantizedColumns,
    QuantizedRows,
    QuantizedTensor,
)


@op(fake=empty_rows)
def quantize_rows(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_1K: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
    rounded_to: torch.dtype | None = None,
    rotated: bool = False,
) -> QuantizedRows:
    """`numerics.quantize_rows(x_MK * multiplier_1K)`. x_MK: bfloat16, float16 or float32, any strides.

    fmt: a key of `numerics.FORMATS`. multiplier_1K: float32. transposed: q_MK is stored column by column.
    rounded_to: bfloat16, float16 or float32, to which x_MK is rounded first; None: its own dtype. rotated:
    then it is rotated by `numerics.rotate`; not together with a multiplier.
    """
    assert multiplier_1K is None or not rotated
    backend = _backend(x_MK, fmt, power_of_two)
    if backend == "triton":
        quantize = triton_kernels().quantize_rows
        options = (fmt, power_of_two, transposed, rounded_to)
        return QuantizedRows(*quantize(x_MK, multiplier_1K, *options, rotated=rotated))
    if backend == "native":
        q, scale = native.quantize_rows(x_MK, multiplier_1K, rounded_to, rotated=rotated)
    else:
        if rotated:
            x_MK, rounded_to = numerics.rotate(_rounded(x_MK, rounded_to)), None
        folded = _fold(_rounded(x_MK, rounded_to), multiplier_1K)
        q, scale = numerics.quantize_rows(folded, FORMATS[fmt], power_of_two=power_of_two)
    return QuantizedRows(stored(q, transposed), scale)


def _empty_packed(x_MK: Tensor, num_rows: int) -> Tensor:
    return empty_buffer(x_MK, num_rows, x_MK.shape[1])


@op(fake=_empty_packed)
def quantize_packed_rows(
    x_MK: Tensor,
    num_rows: int,
    fmt: str,
    *,
    power_of_two: bool = False,
    rounded_to: torch.dtype | None = None,
    rotated: bool = False,
) -> Tensor:
    """`pack_rows(quantize_rows(x_MK, fmt, ...), num_rows)`, uint8 (num_rows, HEADER_BYTES + K).

    num_rows: at least M. K: a multiple of 4. Other arguments as for `quantize_rows`. It returns the buffer
    alone, since results of an op must not share memory; `unpack_rows` returns q and scale as views of it.
    """
    backend, (m, k) = _backend(x_MK, fmt, power_of_two), x_MK.shape
    if backend == "reference" or x_MK.numel() == 0:
        x_MK = _rounded(x_MK, rounded_to)
        x_MK = numerics.rotate(x_MK) if rotated else x_MK
        return pack_rows(numerics.quantize_rows(x_MK, FORMATS[fmt], power_of_two=power_of_two), num_rows)
    buffer = empty_buffer(x_MK, num_rows, k)
    buffer[m:].zero_()
    # The kernels write a scale and zeros over the whole header.
    out = buffer[:m, HEADER_BYTES:].view(torch.int8), buffer[:m, :HEADER_BYTES].view(torch.float32)
    if backend == "triton":
        quantize = triton_kernels().quantize_rows
        # contiguous: with `out`, the kernel needs rows that are stored row by row.
        quantize(x_MK.contiguous(), None, fmt, power_of_two, False, rounded_to, out, rotated)
    else:
        native.quantize_rows(x_MK, None, rounded_to, out, rotated)
    return buffer


@op(fake=empty_columns)
def quantize_columns(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_M1: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> QuantizedColumns:
    """`numerics.quantize_columns(x_MK * multiplier_M1)`; arguments as for `quantize_rows`."""
    backend = _backend(x_MK, fmt, power_of_two)
    if backend == "triton":
        quantize = triton_kernels().quantize_columns
        return QuantizedColumns(*quantize(x_MK, multiplier_M1, fmt, power_of_two, transposed))
    if backend == "native":
        q, scale = native.quantize_columns(x_MK, multiplier_M1)
    else:
        folded = _fold(x_MK, multiplier_M1)
        q, scale = numerics.quantize_columns(folded, FORMATS[fmt], power_of_two=power_of_two)
    return QuantizedColumns(stored(q, transposed), scale)


def _empty_rows_and_columns(
    x_MK: Tensor, fmt: str, transposed: bool
) -> tuple[QuantizedRows, QuantizedColumns]:
    return empty_rows(x_MK, fmt), empty_columns(x_MK, fmt, transposed)


@op(fake=_empty_rows_and_columns)
def quantize_rows_and_columns(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_1K: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> tuple[QuantizedRows, QuantizedColumns]:
    """Rows of `x * multiplier_1K` and columns of `x`: the two operands that backward makes of a gradient.

    transposed: for the columns. Rows are always stored row by row.
    """
    backend = _backend(x_MK, fmt, power_of_two)
    if backend == "triton":
        quantize = triton_kernels().quantize_rows_and_columns
        q_rows, scale_M1, q_columns, scale_1K = quantize(x_MK, multiplier_1K, fmt, power_of_two, transposed)
        return QuantizedRows(q_rows, scale_M1), QuantizedColumns(q_columns, scale_1K)
    if backend == "native":
        q_rows, scale_M1, q_columns, scale_1K = native.quantize_rows_and_columns(x_MK, multiplier_1K)
    else:
        form, folded = FORMATS[fmt], _fold(x_MK, multiplier_1K)
        q_rows, scale_M1 = numerics.quantize_rows(folded, form, power_of_two=power_of_two)
        q_columns, scale_1K = numerics.quantize_columns(x_MK, form, power_of_two=power_of_two)
    return QuantizedRows(stored(q_rows), scale_M1), QuantizedColumns(stored(q_columns, transposed), scale_1K)


@op(fake=empty_tensor)
def quantize_tensor(
    x_MK: Tensor, fmt: str, *, power_of_two: bool = False, transposed: bool = False
) -> QuantizedTensor:
    """`numerics.quantize_tensor(x_MK)`. transposed: q_MK is stored column by column."""
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        return QuantizedTensor(*triton_kernels().quantize_tensor(x_MK, fmt, power_of_two, transposed))
    if backend == "native" and native.has_format(fmt):
        q, scale, _ = native.quantize_tensor(x_MK, fmt, power_of_two)
    else:
        q, scale = numerics.quantize_tensor(x_MK, FORMATS[fmt], power_of_two=power_of_two)
    return QuantizedTensor(stored(q, transposed), scale)


@op(fake=empty_tensor_both_ways)
def quantize_tensor_both_ways(
    x_MK: Tensor, fmt: str, *, power_of_two: bool = False
) -> tuple[QuantizedTensor, Tensor]:
    """`numerics.quantize_tensor(x_MK)` stored row by row, and its q_MK again, stored column by column."""
    if _backend(x_MK, fmt, power_of_two) == "triton":
        q, by_columns, scale = triton_kernels().quantize_tensor_both_ways(x_MK, fmt, power_of_two)
        return QuantizedTensor(q, scale), by_columns
    quantized = quantize_tensor(x_MK, fmt, power_of_two=power_of_two)
    return quantized, stored_by_columns(quantized.q_MK)


@op(fake=empty_blocks)
def quantize_blocks(
    x_MK: Tensor, block: Sequence[int], fmt: str, *, e8m0: bool = False, transposed: bool = False
) -> QuantizedBlocks:
    """`numerics.quantize_blocks(x_MK, block)`. e8m0: its scales are powers of two, stored in E8M0
    (numerics/mx.py). transposed: q_MK is stored column by column.
    """
    rows, columns = block
    if _has_tile(x_MK, rows, columns):
        quantize = triton_kernels().quantize_blocks
        return QuantizedBlocks(*quantize(x_MK, (rows, columns), fmt, e8m0, transposed))
    q, scale = numerics.quantize_blocks(x_MK, (rows, columns), FORMATS[fmt], power_of_two=e8m0)
    scale = numerics.to_e8m0(scale) if e8m0 else scale
    return QuantizedBlocks(stored(q, transposed), scale.contiguous())


def _empty_row_and_column_blocks(
    x_MK: Tensor, size: int, fmt: str, e8m0: bool, transposed: bool
) -> tuple[QuantizedBlocks, QuantizedBlocks]:
    return empty_blocks(x_MK, (1, size), fmt, e8m0), empty_blocks(x_MK, (size, 1), fmt, e8m0, transposed)


@op(fake=_empty_row_and_column_blocks)
def quantize_row_and_column_blocks(
    x_MK: Tensor, size: int, fmt: str, *, e8m0: bool = False, transposed: bool = False
) -> tuple[QuantizedBlocks, QuantizedBlocks]:
    """`quantize_blocks` by (1, size) and by (size, 1): the two operands that backward makes of a gradient.

    transposed: for the second; the first is always stored row by row.
    """
    if _has_tile(x_MK, 1, size):
        quantize = triton_kernels().quantize_row_and_column_blocks
        row_q, row_scale, column_q, column_scale = quantize(x_MK, size, fmt, e8m0, transposed)
        return QuantizedBlocks(row_q, row_scale), QuantizedBlocks(column_q, column_scale)
    rows = quantize_blocks(x_MK, (1, size), fmt, e8m0=e8m0)
    return rows, quantize_blocks(x_MK, (size, 1), fmt, e8m0=e8m0, transposed=transposed)


def _empty_rotated(x_MK: Tensor, dtype: torch.dtype) -> Tensor:
    return x_MK.new_empty(x_MK.shape, dtype=dtype)


@op(fake=_empty_rotated)
def rotate(x_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """`numerics.rotate(x_MK)`, computed in float32 and rounded once to `dtype`."""
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "native":
        return native.rotate_rows(x_MK, dtype)
    if backend == "triton":
        rotated: Tensor = triton_kernels().rotate(x_MK, None, dtype)
        return rotated
    return numerics.rotate(x_MK).to(dtype)


def dequantize_rotated(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Rows that were quantized `rotated`: dequantized, rotated back, and rounded once to `dtype`."""
    return rotate(numerics.dequantize(QuantizedRows(*rows)), dtype)


def _backend(x: Tensor, fmt: str, power_of_two: bool) -> str:
    backend = choose_backend("quantize", x.device.type)
    # The C++ has INT8 with plain scales.
    return "reference" if backend == "native" and (fmt != "int8" or power_of_two) else backend


def _has_tile(x: Tensor, rows: int, columns: int) -> bool:
    """Whether Triton quantizes x: its tiles are powers of two on each side and hold whole blocks."""
    whole = all(size <= 128 and size & (size - 1) == 0 for size in (rows, columns))
    return whole and choose_backend("quantize", x.device.type) == "triton"


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _fold(x: Tensor, multiplier: Tensor | None) -> Tensor:
    return x if multiplier is None else x.to(torch.float32) * multiplier
