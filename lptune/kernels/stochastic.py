"""Quantizers that round stochastically, for two kinds of tensors: gradients, whose rounding errors otherwise
may add up, and weights that are stored in INT8, whose small updates otherwise are lost.

The random bits are a function of (seed, step, layer's name, index of the element among the layer's gradients
of the step's global batch) and of nothing else (lptune/numerics/rounding.py). They do not depend on the rank,
the order of micro-batches or a resume. Where tensor parallelism cuts a gradient, the index counts within the
part, and each part has its own bits. Ranks that have the same gradient round it alike. A layer that is called
several times in a pass, as a head in chunks, draws the same bits in each call.

The key, a hash of the first three, travels in the layer's handle (record.py), so that a new step needs no new
graph.

On CUDA the op runs plain torch, which costs time. Stochastic rounding is off by default.
"""

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend
from lptune.kernels.fakes import empty_columns, empty_q, empty_rows, empty_tensor
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
    x_MK: Tensor, fmt: str, layer: Tensor, *, multiplier_M1: Tensor | None = None, power_of_two: bool = False
) -> QuantizedColumns:
    """`quantize_columns(x * multiplier)`, rounded stochastically; layer: as for rows."""
    return QuantizedColumns(*quantize_stochastic(x_MK, multiplier_M1, fmt, power_of_two, 0, layer))


def quantize_tensor_stochastic(
    x_MK: Tensor, fmt: str, layer: Tensor, *, power_of_two: bool = False
) -> QuantizedTensor:
    """`quantize_tensor(x)`, rounded stochastically; layer: as for rows."""
    return QuantizedTensor(*quantize_stochastic(x_MK, None, fmt, power_of_two, 2, layer))


def quantize_weight_rows(w_MK: Tensor, key: int, first: int) -> QuantizedRows:
    """`quantize_rows(w)` in INT8, rounded stochastically: how a weight that is stored in INT8 is updated.

    key: numerics.random_key. first: index of w's first element in the whole, unsharded weight.
    """
    scale, inverse = numerics.find_scale(w_MK, 1, FORMATS["int8"], False)
    return QuantizedRows(round_weight(w_MK, inverse, key, first), scale)


def _empty_int8(w_MK: Tensor) -> Tensor:
    return empty_q(w_MK, "int8")


# No optimizer is compiled. It is an op because a dry run passes fake tensors, and C++ needs an address.
@op(fake=_empty_int8)
def round_weight(w_MK: Tensor, inverse_M1: Tensor, key: int, first: int) -> Tensor:
    """`w * inverse` in INT8, rounded stochastically; key, first: as for `quantize_weight_rows`."""
    return _round(w_MK, inverse_M1, "int8", key, first)


def _empty_by_dim(x_MK: Tensor, fmt: str, dim: int) -> tuple[Tensor, Tensor]:
    if dim == 2:
        return empty_tensor(x_MK, fmt)
    return empty_rows(x_MK, fmt) if dim == 1 else empty_columns(x_MK, fmt)


@op(fake=_empty_by_dim)
def quantize_stochastic(
    x_MK: Tensor, multiplier: Tensor | None, fmt: str, power_of_two: bool, dim: int, layer: Tensor
) -> tuple[Tensor, Tensor]:
    """The op behind the three quantizers above. dim: 1 for rows, 0 for columns, 2 for the tensor."""
    key, micro_batch = int(layer[KEY]), int(layer[MICRO_BATCH])
    if key == 0:
        raise RuntimeError(
            "stochastic rounding has no random key: call low.micro_batch(number) of linear.LowPrecision "
            "before each forward and backward"
        )
    if part := int(layer[PART]):
        key = numerics.random_key(key, part, "part")
    x = x_MK if multiplier is None else x_MK.to(torch.float32) * multiplier
    first = micro_batch * x.numel()
    scale, inverse = numerics.find_scale(x, _DIMS[dim], FORMATS[fmt], power_of_two)
    return _round(x, inverse, fmt, key ^ _SALTS[dim], first), scale


def _round(x: Tensor, inverse: Tensor, fmt: str, key: int, first: int) -> Tensor:
    """x * inverse, rounded stochastically; `first`: index of the first element, for its random bits."""
    if fmt == "int8" and choose_backend("quantize", x.device.type) == "native":
        return native.round_stochastically(x, inverse, key, first)
    index = torch.arange(first, first + x.numel(), device=x.device).view(x.shape)
    random = numerics.uniform(key, index)
    return numerics.stochastic_round_to(x.to(torch.float32) * inverse, FORMATS[fmt], random).contiguous()
