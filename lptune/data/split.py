"""Chooses the documents to hold out: a function of the seed and the prompts alone.

Documents with equal prompts are all held out or all trained on. Otherwise the held-out loss would be that of
prompts which training has seen.
"""

import numpy as np
import numpy.typing as npt

from lptune.data.order import shuffled


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
