"""Quantizers as custom ops: they make the operands of 8-bit GEMMs.

On every device and with every backend, an op gives the same bits as the function of the same name in
`lptune.numerics`; backends differ in how often they read x. An op is opaque to torch.compile, so compiled and
eager runs quantize alike by construction.

`multiplier` folds the scales of another operand in before quantization (lptune/linear/kinds/rowwise.py): rows
of `x * multiplier_1K`, columns of `x * multiplier_M1`, with the product rounded to float32.

`transposed` stores the values column by column; the result has the same shape and other strides. Tensor cores
want both operands of an 8-bit GEMM contiguous along the contraction ("K-major"; another layout costs 1.5x to
2.6x on Hopper). The cheapest moment to transpose a matrix is when it is written.

`quantize_by_amax` is for some rows of a matrix whose other rows are on other ranks: the caller gives the
amax.
"""

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.numerics import (
    FORMATS,
    QuantizedBlocks,
    QuantizedColumns,
    QuantizedMX,
    QuantizedRows,
    QuantizedTensor,
)

_OPTIONAL = Tensor | None


def quantize_rows(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_1K: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> QuantizedRows:
    """`numerics.quantize_rows(x_MK * multiplier_1K)`. x_MK: bfloat16, float16 or float32, any strides.

    fmt: a key of `numerics.FORMATS`. multiplier_1K: float32. transposed: q_MK is stored column by column.
    """
    return QuantizedRows(*_quantize_rows(x_MK, multiplier_1K, fmt, power_of_two, transposed))


def quantize_columns(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_M1: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> QuantizedColumns:
    """`numerics.quantize_columns(x_MK * multiplier_M1)`; arguments as for `quantize_rows`."""
    return QuantizedColumns(*_quantize_columns(x_MK, multiplier_M1, fmt, power_of_two, transposed))


def quantize_rows_and_columns(
    x_MK: Tensor,
    fmt: str,
    *,
    multiplier_1K: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> tuple[QuantizedRows, QuantizedColumns]:
    """Rows of `x * multiplier_1K` and columns of `x`: the two operands that backward makes of a gradient.

    transposed: for the columns; the rows are always stored row by row.
    """
    q_rows, scale_M1, q_columns, scale_1K = _quantize_rows_and_columns(
        x_MK, multiplier_1K, fmt, power_of_two, transposed
    )
    return QuantizedRows(q_rows, scale_M1), QuantizedColumns(q_columns, scale_1K)


def quantize_tensor(
    x_MK: Tensor, fmt: str, *, power_of_two: bool = False, transposed: bool = False
) -> QuantizedTensor:
    """`numerics.quantize_tensor(x_MK)`. transposed: q_MK is stored column by column."""
    return QuantizedTensor(*_quantize_tensor(x_MK, fmt, power_of_two, transposed))


def quantize_tensor_both_ways(
    x_MK: Tensor, fmt: str, *, power_of_two: bool = False
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`numerics.quantize_tensor(x_MK)`, stored row by row and stored column by column."""
    by_rows, by_columns, scale = _quantize_tensor_both_ways(x_MK, fmt, power_of_two)
    return QuantizedTensor(by_rows, scale), QuantizedTensor(by_columns, scale)


def quantize_blocks(
    x_MK: Tensor,
    block: tuple[int, int],
    fmt: str,
    *,
    power_of_two: bool = False,
    transposed: bool = False,
) -> QuantizedBlocks:
    """`numerics.quantize_blocks(x_MK, block)`. transposed: q_MK is stored column by column."""
    return QuantizedBlocks(*_quantize_blocks(x_MK, block[0], block[1], fmt, power_of_two, transposed))


def quantize_mx(x_MK: Tensor, dim: int, fmt: str, *, transposed: bool = False) -> QuantizedMX:
    """`numerics.quantize_mx(x_MK, dim)`: blocks of 32 along `dim`, scales in E8M0."""
    return QuantizedMX(*_quantize_mx(x_MK, dim, fmt, transposed))


def quantize_row_and_column_blocks(
    x_MK: Tensor, size: int, fmt: str, *, transposed: bool = False
) -> tuple[QuantizedBlocks, QuantizedBlocks]:
    """`quantize_blocks` by (1, size) and by (size, 1): the two operands that backward makes of a gradient.

    transposed: for the second; the first is always stored row by row.
    """
    row_q, row_scale, column_q, column_scale = _quantize_row_and_column_blocks(
        x_MK, size, fmt, False, transposed
    )
    return QuantizedBlocks(row_q, row_scale), QuantizedBlocks(column_q, column_scale)


def quantize_mx_rows_and_columns(
    x_MK: Tensor, fmt: str, *, transposed: bool = False
) -> tuple[QuantizedMX, QuantizedMX]:
    """`quantize_mx` along dim 1 and along dim 0; `transposed` as for `quantize_row_and_column_blocks`."""
    row_q, row_scale, column_q, column_scale = _quantize_row_and_column_blocks(
        x_MK, numerics.MX_BLOCK, fmt, True, transposed
    )
    return QuantizedMX(row_q, row_scale), QuantizedMX(column_q, column_scale)


def transposed_copy(q_MK: Tensor) -> Tensor:
    """A copy of `q_MK` that is stored column by column, for values that were stored row by row."""
    return q_MK.t().contiguous().t()


def quantize_by_amax(
    x_MK: Tensor,
    amax: Tensor,
    fmt: str,
    *,
    power_of_two: bool = False,
    block: int | None = None,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """(q_MK, scale) of some rows of a larger matrix, bitwise those of the whole matrix with this `amax`.

    amax: float32 of the larger matrix, (1, 1), or one for each of its blocks of `block` x `block`; scale has
    its shape. first_row: row of the larger matrix at which x begins. Values above the amax saturate, but inf
    and NaN become NaN in float8.
    """
    q_MK, scale = _quantize_by_amax(x_MK, amax, fmt, power_of_two, block, first_row)
    return q_MK, scale


@torch.library.custom_op("lptune::quantize_rows", mutates_args=())
def _quantize_rows(
    x_MK: Tensor, multiplier_1K: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        q, scale = triton_kernels().quantize_rows(x_MK, multiplier_1K, fmt, power_of_two, transposed)
        return q, scale
    if backend == "native" and fmt == "int8" and not power_of_two:
        q, scale = native.quantize_rows(x_MK, multiplier_1K)
    else:
        q, scale = numerics.quantize_rows(_fold(x_MK, multiplier_1K), FORMATS[fmt], power_of_two=power_of_two)
    return _store(q, transposed), scale


@torch.library.custom_op("lptune::quantize_columns", mutates_args=())
def _quantize_columns(
    x_MK: Tensor, multiplier_M1: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        q, scale = triton_kernels().quantize_columns(x_MK, multiplier_M1, fmt, power_of_two, transposed)
        return q, scale
    if backend == "native" and fmt == "int8" and not power_of_two:
        q, scale = native.quantize_columns(x_MK, multiplier_M1)
    else:
        folded = _fold(x_MK, multiplier_M1)
        q, scale = numerics.quantize_columns(folded, FORMATS[fmt], power_of_two=power_of_two)
    return _store(q, transposed), scale


@torch.library.custom_op("lptune::quantize_rows_and_columns", mutates_args=())
def _quantize_rows_and_columns(
    x_MK: Tensor, multiplier_1K: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        q_rows, scale_M1, q_columns, scale_1K = triton_kernels().quantize_rows_and_columns(
            x_MK, multiplier_1K, fmt, power_of_two, transposed
        )
        return q_rows, scale_M1, q_columns, scale_1K
    if backend == "native" and fmt == "int8" and not power_of_two:
        q_rows, scale_M1, q_columns, scale_1K = native.quantize_rows_and_columns(x_MK, multiplier_1K)
    else:
        q_rows, scale_M1 = numerics.quantize_rows(
            _fold(x_MK, multiplier_1K), FORMATS[fmt], power_of_two=power_of_two
        )
        q_columns, scale_1K = numerics.quantize_columns(x_MK, FORMATS[fmt], power_of_two=power_of_two)
    return _store(q_rows, False), scale_M1, _store(q_columns, transposed), scale_1K


@torch.library.custom_op("lptune::quantize_tensor", mutates_args=())
def _quantize_tensor(x_MK: Tensor, fmt: str, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        q, scale = triton_kernels().quantize_tensor(x_MK, fmt, power_of_two, transposed)
        return q, scale
    if backend == "native" and fmt == "int8" and not power_of_two:
        q, scale = native.quantize_tensor(x_MK)
    else:
        q, scale = numerics.quantize_tensor(x_MK, FORMATS[fmt], power_of_two=power_of_two)
    return _store(q, transposed), scale


@torch.library.custom_op("lptune::quantize_tensor_both_ways", mutates_args=())
def _quantize_tensor_both_ways(x_MK: Tensor, fmt: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    if choose_backend("quantize", x_MK.device.type) == "triton":
        q, by_columns, scale = triton_kernels().quantize_tensor_both_ways(x_MK, fmt, power_of_two)
        return q, by_columns, scale
    q, scale = _quantize_tensor(x_MK, fmt, power_of_two, False)
    return q, q.t().clone(memory_format=torch.contiguous_format).t(), scale


@torch.library.custom_op("lptune::quantize_blocks", mutates_args=())
def _quantize_blocks(
    x_MK: Tensor, block_rows: int, block_columns: int, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    block = (block_rows, block_columns)
    if choose_backend("quantize", x_MK.device.type) == "triton" and _has_tile(block):
        q, scale = triton_kernels().quantize_blocks(x_MK, block, fmt, power_of_two, transposed)
        return q, scale
    q, scale = numerics.quantize_blocks(x_MK, block, FORMATS[fmt], power_of_two=power_of_two)
    return _store(q, transposed), scale.contiguous()


@torch.library.custom_op("lptune::quantize_mx", mutates_args=())
def _quantize_mx(x_MK: Tensor, dim: int, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    if choose_backend("quantize", x_MK.device.type) == "triton":
        block = (1, numerics.MX_BLOCK) if dim == 1 else (numerics.MX_BLOCK, 1)
        q, scale = triton_kernels().quantize_blocks(x_MK, block, fmt, True, transposed, e8m0=True)
        return q, scale
    q, scale = numerics.quantize_mx(x_MK, dim, FORMATS[fmt])
    return _store(q, transposed), scale.contiguous()


@torch.library.custom_op("lptune::quantize_row_and_column_blocks", mutates_args=())
def _quantize_row_and_column_blocks(
    x_MK: Tensor, size: int, fmt: str, mx: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if choose_backend("quantize", x_MK.device.type) == "triton" and _has_tile((1, size)):
        row_q, row_scale, column_q, column_scale = triton_kernels().quantize_row_and_column_blocks(
            x_MK, size, fmt, mx, transposed
        )
        return row_q, row_scale, column_q, column_scale
    if mx:
        return *_quantize_mx(x_MK, 1, fmt, False), *_quantize_mx(x_MK, 0, fmt, transposed)
    rows = _quantize_blocks(x_MK, 1, size, fmt, False, False)
    return *rows, *_quantize_blocks(x_MK, size, 1, fmt, False, transposed)


@torch.library.custom_op("lptune::quantize_by_amax", mutates_args=())
def _quantize_by_amax(
    x_MK: Tensor, amax: Tensor, fmt: str, power_of_two: bool, block: int | None, first_row: int
) -> tuple[Tensor, Tensor]:
    # Plain torch on every device. A kernel for it would be the second phase of quantize_tensor.
    (m, k), form = x_MK.shape, FORMATS[fmt]
    scale, inverse = numerics.scale_from_amax(amax, form, power_of_two)
    if block is not None:
        first_block = first_row // block
        above = first_row - first_block * block
        inverse = numerics.expand_blocks(inverse[first_block:], (block, block), (above + m, k))[above:]
    x32 = x_MK.to(torch.float32)
    scaled = x32 * inverse
    if form.mantissa_bits is not None:
        # An amax of past steps does not show an inf, which would saturate.
        scaled = torch.where(x32.isinf(), torch.nan, scaled)
    return numerics.round_to(scaled, form).contiguous(), scale


def _has_tile(block: tuple[int, int]) -> bool:
    # A Triton tile is a power of two on each side, and holds whole blocks.
    return all(size <= 128 and size & (size - 1) == 0 for size in block)


def _fold(x: Tensor, multiplier: Tensor | None) -> Tensor:
    return x if multiplier is None else x.to(torch.float32) * multiplier


def _store(q: Tensor, transposed: bool) -> Tensor:
    return q.t().contiguous().t() if transposed else q.contiguous()


def _empty(x: Tensor, fmt: str, transposed: bool) -> Tensor:
    dtype = FORMATS[fmt].dtype
    return x.new_empty(x.shape[::-1], dtype=dtype).t() if transposed else x.new_empty(x.shape, dtype=dtype)


def _scale(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


@_quantize_rows.register_fake
def _(
    x_MK: Tensor, multiplier_1K: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    return _empty(x_MK, fmt, transposed), _scale(x_MK, x_MK.shape[0], 1)


@_quantize_columns.register_fake
def _(
    x_MK: Tensor, multiplier_M1: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    return _empty(x_MK, fmt, transposed), _scale(x_MK, 1, x_MK.shape[1])


@_quantize_rows_and_columns.register_fake
def _(
    x_MK: Tensor, multiplier_1K: _OPTIONAL, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x_MK.shape
    return (
        _empty(x_MK, fmt, False),
        _scale(x_MK, m, 1),
        _empty(x_MK, fmt, transposed),
        _scale(x_MK, 1, k),
    )


@_quantize_tensor.register_fake
def _(x_MK: Tensor, fmt: str, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    return _empty(x_MK, fmt, transposed), _scale(x_MK, 1, 1)


@_quantize_tensor_both_ways.register_fake
def _(x_MK: Tensor, fmt: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x_MK, fmt, False), _empty(x_MK, fmt, True), _scale(x_MK, 1, 1)


@_quantize_blocks.register_fake
def _(
    x_MK: Tensor, block_rows: int, block_columns: int, fmt: str, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    return _empty(x_MK, fmt, transposed), _scale(x_MK, -(-m // block_rows), -(-k // block_columns))


@_quantize_row_and_column_blocks.register_fake
def _(x_MK: Tensor, size: int, fmt: str, mx: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, k), dtype = x_MK.shape, torch.float8_e8m0fnu if mx else torch.float32
    return (
        _empty(x_MK, fmt, False),
        x_MK.new_empty((m, -(-k // size)), dtype=dtype),
        _empty(x_MK, fmt, transposed),
        x_MK.new_empty((-(-m // size), k), dtype=dtype),
    )


@_quantize_by_amax.register_fake
def _(
    x_MK: Tensor, amax: Tensor, fmt: str, power_of_two: bool, block: int | None, first_row: int
) -> tuple[Tensor, Tensor]:
    return _empty(x_MK, fmt, False), torch.empty_like(amax)


@_quantize_mx.register_fake
def _(x_MK: Tensor, dim: int, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    (m, k), size = x_MK.shape, numerics.MX_BLOCK
    shape = (m, -(-k // size)) if dim == 1 else (-(-m // size), k)
    return _empty(x_MK, fmt, transposed), x_MK.new_empty(shape, dtype=torch.float8_e8m0fnu)
