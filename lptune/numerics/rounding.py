"""Stochastic rounding with random bits that any rank can compute again.

Rounding to nearest loses every update that is smaller than half a step. Stochastic rounding keeps it in
expectation: x is rounded up with a probability equal to its distance from the lower neighbour, in steps, so
E[round(x)] = x.

The bits are a hash of (seed, step, tensor name, global index of the element) and of nothing else. There is no
generator with a state. So the bits do not depend on which rank holds the element, on the order in which
tensors are rounded, or on whether the run was resumed.
"""

import hashlib

import torch
from torch import Tensor

from lptune.numerics.formats import Format

_MASK32 = 0xFFFFFFFF


def random_key(seed: int, step: int, name: str) -> int:
    """A hash of (seed, step, name) with 63 bits."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """Uniform float32 in [0, 1), multiples of 2**-24, one for each global element index.

    key: `random_key`, or an int64 tensor holding it. index: int64, any shape, >= 0.
    """
    low = _mix(((key & _MASK32) ^ (index & _MASK32)) & _MASK32)
    high = _mix((low ^ (key >> 32) ^ (index >> 32)) & _MASK32)
    return (high >> 8).to(torch.float32) * 2.0**-24


def stochastic_round_to(scaled: Tensor, fmt: Format, random: Tensor) -> Tensor:
    """float32 values already multiplied by an inverse scale -> one of the two neighbours in `fmt`. The upper
    one has a probability equal to the distance from the lower one, in steps. A number of the format does not
    change.

    random: uniform in [0, 1), same shape. Values beyond the range of the format saturate; NaN is unspecified
    for INT8 and stays NaN in float8.
    """
    step = fmt.spacing(scaled).to(torch.float32)
    # A power of two, so that the quotient is exact. A number of the format is an integer number of steps.
    steps = scaled / step
    below = steps.floor()
    # Both sides are exact. floor(steps + random) would not be: 126 + (1 - 2**-24) rounds to 127.
    rounded = (below + (random < steps - below)) * step
    return rounded.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def stochastic_round_to_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    """float32 -> one of the two neighbours in bfloat16, with the probabilities of `stochastic_round_to`. A
    number of bfloat16 does not change, inf and NaN stay what they are.

    random: uniform in [0, 1), same shape.
    """
    bits = x.view(torch.int32)
    # The upper half of the bits is the neighbour towards zero, the lower one the distance from it in steps.
    distance = (bits & 0xFFFF).to(torch.float32) * 2.0**-16
    rounded = (bits & -0x10000) + (random < distance).to(torch.int32) * 0x10000
    return torch.where(x.isnan(), x, rounded.view(torch.float32)).to(torch.bfloat16)


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32 bits in which every output bit depends on every input bit (the `lowbias32` constants
    of C. Wellons' hash prospector, public domain), in int64 arithmetic.
    """
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)
