"""Several sources as one: their documents one source after the other, each as often as its weight says.

Tokens stay where their source has put them. What a mixture makes is arrays with one entry for each document
and each copy of one: some 40 bytes for a document and 48 for a copy, on every rank.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lptune.data.documents import Documents, offsets_of
from lptune.data.joined import Joined
from lptune.data.order import random_keys


def joined(sources: Sequence[Documents]) -> Documents:
    """The documents of all sources, in order. Their tokens stay where they are."""
    if len(sources) == 1:
        return sources[0]
    return Documents(
        tokens_T=Joined([source.tokens_T for source in sources]),
        is_target_T=Joined([source.is_target_T for source in sources]),
        offsets_N1=offsets_of(np.concatenate([source.lengths for source in sources])),
        answers_N2=np.concatenate([source.answers_N2 for source in sources]),
        prompt_keys_N=np.concatenate([source.prompt_keys_N for source in sources]),
        num_targets_N=np.concatenate([source.num_targets_N for source in sources]),
    )


def weighted(
    numbers_N: npt.NDArray[np.int64], weight: float, seed: int, source: int
) -> npt.NDArray[np.int64]:
    """The documents `numbers_N` as many times as `weight` says. Of 2.3: all of them twice, then three tenths
    of them, chosen at random, once.

    The choice is a function of (how many they are, weight, seed, source). source: which of the sources it is.
    """
    whole, share = divmod(weight, 1)
    order_N = np.argsort(random_keys(seed, "weight", len(numbers_N), source), kind="stable")
    chosen = np.sort(order_N[: round(share * len(numbers_N))])
    return np.concatenate([*([numbers_N] * int(whole)), numbers_N[chosen]])
