"""8-bit rows in one buffer: what ranks send to each other when they gather a weight, or tokens.

Values and scales travel together, since a collective has a cost of its own. Each row has a row in the buffer,
which is uint8:

    | scale, 4 bytes | 12 unused | q, K bytes |    one scale per row; a header of 16 bytes keeps rows aligned
    | q, K bytes |                                 scales for more than one row, which are not in the buffer

The collective wants buffers of one size on all ranks, so a rank with fewer rows adds rows of zeros (padding).
Unused bytes are zero as well: equal rows give equal buffers.

`pack_rows` copies rows into a buffer. The kernels of `quantize_packed_rows` (quantize.py) quantize into it,
without a copy.

Shapes: N rows, K elements in a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 16


class Quantized(NamedTuple):
    """8-bit rows of a matrix, and the scales of these rows or of the whole matrix."""

    q_NK: Tensor  # int8 or float8
    scale: Tensor  # float32; (N, 1) for these rows; or (1, 1) or one per block, for the whole matrix


class Packed(NamedTuple):
    """8-bit rows in a buffer, and their scales if these are not in the buffer."""

    buffer: Tensor  # uint8, (number of rows with padding, header + K)
    scale: Tensor | None  # as in Quantized; None: in the headers


def empty_buffer(like: Tensor, num_rows: int, k: int, header_bytes: int = HEADER_BYTES) -> Tensor:
    """A buffer for `num_rows` rows of `k` elements, on the device of `like`; its bytes are unspecified."""
    return like.new_empty((num_rows, header_bytes + k), dtype=torch.uint8)


def pack_rows(quantized: tuple[Tensor, Tensor], num_rows: int, header_bytes: int = HEADER_BYTES) -> Tensor:
    """Packs 8-bit rows into a buffer, uint8 (num_rows, header_bytes + K). Missing rows are zero (padding).

    quantized: q and scale. The scale is packed only if there is a header. K must then be a multiple of 4,
    because the header is viewed as float32.
    """
    q_NK, scale = quantized
    n, k = q_NK.shape
    buffer = empty_buffer(q_NK, num_rows, k, header_bytes)
    buffer[n:].zero_()
    buffer[:n, :header_bytes].zero_()
    mine = unpack_rows(buffer, n, q_NK.dtype, header_bytes)
    mine.q_NK.copy_(q_NK)
    if header_bytes:
        mine.scale.copy_(scale)
    return buffer


def unpack_rows(
    buffer: Tensor, num_rows: int, dtype: torch.dtype, header_bytes: int = HEADER_BYTES
) -> Quantized:
    """q and scale of the first `num_rows` rows of a buffer, as views. dtype: the 8-bit dtype of q. Without a
    header, the scale has 0 columns.
    """
    rows = buffer[:num_rows]
    return Quantized(rows[:, header_bytes:].view(dtype), rows[:, : min(4, header_bytes)].view(torch.float32))
