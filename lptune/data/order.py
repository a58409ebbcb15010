"""Random numbers for the data: pure functions of (seed, purpose), equal in every process and every version
of numpy.

Only the raw 64-bit output of Philox is used. numpy guarantees that stream, while `Generator.permutation` may
change between versions, and a resumed run must see the same order as the interrupted one.
"""

import zlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]


def random_keys(seed: int, purpose: str, count: int, stream: int = 0) -> UInt64Array:
    """`count` random 64-bit numbers, a function of (seed, purpose, stream)."""
    assert 0 <= stream < 1 << 32, "stream must fit into 32 bits"
    # Philox has a key of 128 bits: the seed and the purpose.
    key = np.array([seed % (1 << 64), zlib.crc32(purpose.encode()) << 32 | stream], dtype=np.uint64)
    numbers: UInt64Array = np.random.Philox(key=key).random_raw(count)
    return numbers


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """The order of rows in an epoch: a permutation of 0..num_rows-1, a function of (seed, epoch)."""
    order = np.argsort(random_keys(seed, "epoch", num_rows, epoch), kind="stable")
    order.setflags(write=False)
    return order


def shuffled(keys: UInt64Array, seed: int) -> UInt64Array:
    """Each key mixed with the seed (splitmix64's finalizer): a random rank that depends on nothing but (key,
    seed).
    """
    with np.errstate(over="ignore"):
        mixed = keys ^ random_keys(seed, "split", 1)[0]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        ranks: UInt64Array = mixed ^ (mixed >> np.uint64(31))
    return ranks
