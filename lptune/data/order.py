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


def weighted(
    numbers_N: npt.NDArray[np.int64], weight: float, seed: int, source: int, size: int = 1
) -> npt.NDArray[np.int64]:
    """Repeats the documents `numbers_N` as often as `weight` says. For 2.3: all of them twice, then a random
    three tenths of them once more.

    The choice is a function of (number of documents, weight, seed, source). source: number of the source.
    size: groups of so many consecutive documents are chosen and repeated as one.
    """
    if size > 1:
        first_G = weighted(numbers_N[::size], weight, seed, source)
        return (first_G[:, None] + np.arange(size)).reshape(-1)
    whole, share = divmod(weight, 1)
    order_N = np.argsort(random_keys(seed, "weight", len(numbers_N), source), kind="stable")
    chosen = np.sort(order_N[: round(share * len(numbers_N))])
    return np.concatenate([*([numbers_N] * int(whole)), numbers_N[chosen]])


def split_by_prompt(
    keys_N: npt.NDArray[np.uint64], fraction: float, seed: int
) -> npt.NDArray[np.bool_] | None:
    """True for each document to hold out: about `fraction` of them, and all or none of those with one key.
    None if one side would be empty.
    """
    unique_P, inverse_N, counts_P = np.unique(keys_N, return_inverse=True, return_counts=True)
    if len(unique_P) < 2:
        return None
    wanted = min(max(1, round(fraction * len(keys_N))), len(keys_N) - 1)
    ranks_P = shuffled(unique_P, seed)
    held_out_P = np.zeros(len(unique_P), dtype=np.bool_)
    taken = 0
    for p in np.argsort(ranks_P, kind="stable").tolist():
        if taken >= wanted:
            break
        if taken + counts_P[p] <= wanted:  # a prompt with too many documents stays in training
            held_out_P[p] = True
            taken += counts_P[p]
    if not taken:
        held_out_P[np.argmin(counts_P)] = True
    held_out_N: npt.NDArray[np.bool_] = held_out_P[inverse_N]
    return held_out_N
