"""Joins the documents of several sources; each source counts as often as its weight says.

Tokens are not copied. A mixture only adds arrays with one entry for each document and each copy of a
document: about 40 bytes for a document and 48 for a copy, on every rank.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lptune.data.documents import Documents, offsets_of
from lptune.data.joined import Joined
from lptune.data.order import random_keys


def joined(sources: Sequence[Documents]) -> Documents:
    """The documents of all sources, in order, without copying their tokens."""
    if len(sources) == 1:
        return sources[0]
    return Documents(
        tokens_T=Joined([source.tokens_T for source in sources]),
        is_target_T=Joined([source.is_target_T for source in sources]),
        offsets_N1=offsets_of(np.concatenate([source.lengths for source in sources])),
        answers_N2=np.concatenate([source.answers_N2 for source in sources]),
        prompt_keys_N=np.concatenate([source.prompt_keys_N for source in sources]),
        num_targets_N=np.concatenate([source.num_targets_N for source in sources]),
        is_desirable_N=np.concatenate([source.is_desirable_N for source in sources]),
    )


def num_sources(documents: Documents) -> int:
    """Number of sources that `documents` come from: documents of `joined`, or a selection of them."""
    return documents.tokens_T.num_arrays if isinstance(documents.tokens_T, Joined) else 1


def sources_of(documents: Documents, numbers_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each of the documents `numbers_N`, the number of its source in `joined`."""
    if isinstance(documents.tokens_T, Joined):
        return documents.tokens_T.array_of(documents.starts_N[numbers_N])
    return np.zeros(len(numbers_N), dtype=np.int64)


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
