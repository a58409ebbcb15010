"""Quantizers that round stochastically, for two kinds of tensors: gradients, whose rounding errors otherwise
may add up, and weights and moments that are stored in INT8 or bfloat16, whose small updates otherwise are
lost.

The random bits are a function of (seed, step, layer's name, index of the element among the layer's gradients
of the step's global batch) and of nothing else (lptune/numerics/rounding.py). They do not depend on the rank,
the order of micro-batches or a resume. Where tensor parallelism cuts a gradient, the index counts within the
part, and each part has its own bits. Ranks that have the same gradient round it alike. A layer that is called
several times in a pass, as a head in chunks, draws the same bits in each call.

The key, a hash of the first three, travels in the layer's handle (record.py), so that a new step needs no new
graph.

Kernels compute the bits in registers. Plain torch, which float8 takes on a CPU, moves 660 to 770 bytes for
each element. Stochastic rounding is off by default.
"""

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.layout import (
    empty_columns,
    empty_rows,
    empty_tensor,
    empty_tensor_both_ways,
    stored,
    stored_by_columns,
)
from lptune.kernels.op import op
from lptune.kernels.record import KEY, MICRO_BATCH, PART
from lptune.numerics import FORMATS, QuantizedColumns, QuantizedRows, QuantizedTensor

# The `dim` of the op -> the dims that share a scale, for find_scale.
_DIMS: dict[int, int | tuple[int, int]] = {1: 1, 0: 0, 2: (0, 1)}
# grad_input and grad_weight each quantize g, with bits of their own.
_SALTS = {1: 0, 0: 0x5DEECE66D, 2: 0x2545F4914F6CDD1D >> 1}


def quantize_rows_stochastic(
    x_MK: Tensor, fmt: str, layer: Tensor, *, multiplier_1K: Tensor | None = None, power_of_two: bool = False
) -> QuantizedRows:
    """`quantize_rows(x * multiplier)`, rounded stochastically. layer: a handle whose key was set."""
    return QuantizedRows(*quantize_stochastic(x_MK, multiplier_1K, fmt, power_of_two, 1, layer))


def quantize_columns_stochastic(
    x_MK: Tensor,
    fmt: str,
    layer: Tensor,
    *,
    multiplier_M1: Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> QuantizedColumns:
    """`quantize_columns(x * multiplier)`, rounded stochastically; layer: as for rows."""
    return QuantizedColumns(
        *quantize_stochastic(x_MK, multiplier_M1, fmt, power_of_two, 0, layer, transposed=transposed)
    )


def quantize_tensor_stochastic(
    x_MK: Tensor, fmt: str, layer: Tensor, *, power_of_two: bool = False, transposed: bool = False
) -> QuantizedTensor:
    """`quantize_tensor(x)`, rounded stochastically; layer: as for rows."""
    return QuantizedTensor(
        *quantize_stochastic(x_MK, None, fmt, power_of_two, 2, layer, transposed=transposed)
    )


@op(fake=empty_tensor_both_ways)
def quantize_tensor_stochastic_both_ways(
    x_MK: Tensor, fmt: str, layer: Tensor, *, power_of_two: bool = False
) -> tuple[QuantizedTensor, Tensor]:
    """`quantize_tensor_stochastic(x)` stored row by row, and its q_MK again, stored column by column."""
    q, scale, by_columns = _quantize(x_MK, None, fmt, power_of_two, 2, layer, twice=True)
    return QuantizedTensor(q, scale), by_columns


def _empty_by_dim(x_MK: Tensor, fmt: str, dim: int, transposed: bool) -> tuple[Tensor, Tensor]:
    if dim == 2:
        return empty_tensor(x_MK, fmt, transposed)
    return empty_rows(x_MK, fmt, transposed) if dim == 1 else empty_columns(x_MK, fmt, transposed)


@op(fake=_empty_by_dim)
def quantize_stochastic(
    x_MK: Tensor,
    multiplier: Tensor | None,
    fmt: str,
    power_of_two: bool,
    dim: int,
    layer: Tensor,
    *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op behind the first three quantizers above. dim: 1 for rows, 0 for columns, 2 for the tensor.
    transposed: q_MK is stored column by column.
    """
    q, scale, _ = _quantize(x_MK, multiplier, fmt, power_of_two, dim, layer, transposed=transposed)
    return q, scale


def _quantize(
    x_MK: Tensor,
    multiplier: Tensor | None,
    fmt: str,
    power_of_two: bool,
    dim: int,
    layer: Tensor,
    *,
    transposed: bool = False,
    twice: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, q again). twice: q is stored row by row, and again column by column; else there is no
    second q.
    """
    key, first = _key_and_first(layer, dim, x_MK.numel())
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        quantize = triton_kernels().quantize_stochastic
        q, scale, by_columns = quantize(
            x_MK, multiplier, fmt, power_of_two, dim, key, first, transposed, twice
        )
        return q, scale, by_columns
    if backend == "native" and dim == 1 and fmt == "int8" and not power_of_two:
        q, scale = native.quantize_rows_stochastic(x_MK, multiplier, key, first)
    else:
        x = x_MK if multiplier is None else x_MK.to(torch.float32) * multiplier
        scale, inverse = numerics.find_scale(x, _DIMS[dim], FORMATS[fmt], power_of_two)
        if backend == "native" and fmt == "int8":
            q = native.round_stochastically(x, inverse, key, first)
        else:
            q = _round(x, inverse, fmt, key, first)
    return stored(q, transposed), scale, stored_by_columns(q) if twice else q[:0]


def random_bits(layer: Tensor, dim: int, like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) for the elements of a gradient, of the shape of `like`. layer, dim: as of
    `quantize_stochastic`.
    """
    return _uniform(*_key_and_first(layer, dim, like.numel()), like)


def _key_and_first(layer: Tensor, dim: int, num_elements: int) -> tuple[int, int]:
    """The random key of a gradient of so many elements, and the index of its first one."""
    key, micro_batch = int(layer[KEY]), int(layer[MICRO_BATCH])
    if key == 0:
        raise RuntimeError(
            "stochastic rounding has no random key: call low.micro_batch(number) of linear.LowPrecision "
            "before each forward and backward"
        )
    if part := int(layer[PART]):
        key = numerics.random_key(key, part, "part")
    return key ^ _SALTS[dim], micro_batch * num_elements


def _uniform(key: int, first: int, like: Tensor) -> Tensor:
    return numerics.uniform(
        key, torch.arange(first, first + like.numel(), device=like.device).view(like.shape)
    )


def _round(x: Tensor, inverse: Tensor, fmt: str, key: int, first: int) -> Tensor:
    """x * inverse, rounded stochastically; `first`: index of the first element, for its random bits."""
    scaled = x.to(torch.float32) * inverse
    return numerics.stochastic_round_to(scaled, FORMATS[fmt], _uniform(key, first, x)).contiguous()


def _empty_weight_rows(w_MK: Tensor) -> QuantizedRows:
    return empty_rows(w_MK, "int8")


# No optimizer is compiled. It is an op because a dry run passes fake tensors, and kernels need an address.
@op(fake=_empty_weight_rows)
def quantize_weight_rows(
    w_MK: Tensor,
    key: int,
    first: int,
    *,
    q_before: Tensor | None = None,
    scale_before: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> QuantizedRows:
    """`quantize_rows(w)` in INT8, rounded stochastically: how a weight that is stored in INT8 is updated.

    key: numerics.random_key. first: index of w's first element in the whole, unsharded weight.
    found_inf: float32, one element. Where it is 1, the results are q_before (M, K) and scale_before (M, 1);
    all three belong together.
    """
    backend = choose_backend("quantize", w_MK.device.type)
    before = None if q_before is None or scale_before is None else (q_before, scale_before)
    # The host does not read `found_inf`: on a GPU it would wait for the device.
    if backend == "triton":
        quantize = triton_kernels().quantize_rows_stochastic
        return QuantizedRows(*quantize(w_MK, None, "int8", False, key, first, before, found_inf))
    if backend == "native":
        return QuantizedRows(*native.quantize_rows_stochastic(w_MK, None, key, first, before, found_inf))
    scale, inverse = numerics.find_scale(w_MK, 1, FORMATS["int8"], False)
    updated = QuantizedRows(_round(w_MK, inverse, "int8", key, first), scale)
    if found_inf is None or before is None:
        return updated
    skips = found_inf.reshape(1, 1) == 1
    return QuantizedRows(*(torch.where(skips, old, new) for old, new in zip(before, updated, strict=True)))


def _empty_bfloat16(x_MK: Tensor, key: int, first: int) -> Tensor:
    return torch.empty_like(x_MK, dtype=torch.bfloat16)


@op(fake=_empty_bfloat16)
def round_to_bfloat16(x_MK: Tensor, key: int, first: int) -> Tensor:
    """float32 -> bfloat16, rounded up or down with the probability of the distance from below, in steps.

    x_MK: contiguous. key: numerics.random_key. first: index of x's first element in the whole tensor.
    """
    backend = choose_backend("quantize", x_MK.device.type)
    if backend == "triton":
        rounded: Tensor = triton_kernels().round_to_bfloat16(x_MK, key, first)
        return rounded
    if backend == "native":
        return native.round_to_bfloat16(x_MK, key, first)
    return numerics.stochastic_round_to_bfloat16(x_MK, _uniform(key, first, x_MK))
