"""Stochastic rounding with random bits that anybody can compute again.

Round to nearest loses every update smaller than half a step; stochastic rounding keeps it in expectation:
x goes up with the probability of its distance from below, so E[round(x)] = x.

The bits are a hash of (seed, step, tensor name, global index of the element) and of nothing else. No
generator is advanced, so it does not matter which rank holds the element, in which order tensors are rounded
or whether the run was resumed: the bits are the same.
"""

import hashlib

import torch
from torch import Tensor

from lptune.numerics.formats import Format

_MASK32 = 0xFFFFFFFF


def random_key(seed: int, step: int, name: str) -> int:
    """63 bits that stand for (seed, step, name)."""
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
    """float32 values already multiplied by an inverse scale -> one of the two neighbours in `fmt`: the upper
    one with the probability of the distance from the lower, in units of their distance. A number of the
    format stays what it is.

    random: uniform in [0, 1), same shape. Values beyond the format's range saturate; NaN is unspecified for
    INT8 and stays NaN in float8.
    """
    step = fmt.spacing(scaled).to(torch.float32)
    # A power of two, so that the quotient is exact; a number of the format is an integer in units of it.
    steps = scaled / step
    below = steps.floor()
    # Both sides of the comparison are exact. floor(steps + random) would not be: 126 + (1 - 2**-24) is 127.
    rounded = (below + (random < steps - below)) * step
    return rounded.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32 bits whose every output bit depends on every input bit (the `lowbias32` constants of
    C. Wellons' hash prospector, public domain), in int64 arithmetic.
    """
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)
