"""Rotation by Hadamard blocks, which spreads an outlier over its block before quantizing.

One outlier makes the step of all values that share its scale coarse. Activations of real models have such
outliers, always in the same few channels. A product does not change if both operands are rotated along the
contraction by an orthogonal matrix H, `x @ w.T == (x @ H) @ (w @ H).T`, and the rotated outlier is shared by
all channels of its block: of a block of 128, each gets 1 / sqrt(128) of it (QuaRot, arXiv:2404.00456; HALO,
arXiv:2501.02625, for training).

H is block-diagonal. A block is Sylvester's Hadamard matrix, of +1 and -1, times 1 / sqrt(size). It is
symmetric and orthogonal, so a second rotation undoes the first. A dimension is cut into blocks of 128, and
what is left over into powers of two, larger ones first: 300 = 128 + 128 + 32 + 8 + 4. So any size is rotated;
of an odd size, the last element stays as it is.

The bits are defined, for all implementations: float32; for half = 1, 2, 4, …, block / 2 each pair (a, b) of
elements `half` apart becomes (a + b, a - b); then one product with float32(1 / sqrt(block)). Zeros stay
zeros, and a NaN or inf makes all of its block NaN or inf.
"""

import math

import torch
from torch import Tensor

ROTATION_BLOCK = 128


def rotation_runs(size: int) -> list[tuple[int, int, int]]:
    """(start, block, number of blocks) of the runs of equal blocks into which a dimension is cut."""
    runs, start, block = [], 0, ROTATION_BLOCK
    while start < size:
        count = (size - start) // block
        if count:
            runs.append((start, block, count))
        start, block = start + count * block, block // 2
    return runs


def rotate(x_MK: Tensor) -> Tensor:
    """`x @ H` in float32; its own inverse. x_MK: any float dtype, (M, K)."""
    x32 = x_MK.to(torch.float32)
    parts = [
        rotate_blocks(x32[:, start : start + block * count].unflatten(1, (count, block))).flatten(1)
        for start, block, count in rotation_runs(x_MK.shape[1])
    ]
    return torch.cat(parts, 1) if parts else torch.empty_like(x32)


def rotate_blocks(x_MCB: Tensor) -> Tensor:
    """Each block of B elements, a power of two, times Sylvester's matrix / sqrt(B). x_MCB: float32."""
    block, half = x_MCB.shape[2], 1
    while half < block:
        a, b = x_MCB.unflatten(2, (block // (2 * half), 2, half)).unbind(3)
        x_MCB = torch.stack((a + b, a - b), 3).flatten(2)
        half *= 2
    return x_MCB * (1 / math.sqrt(block))
