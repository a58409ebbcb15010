"""The FLOPs of attention, which linear layers do not include.

For each query head and each pair of a query and a visible key, forward has two products of size D, one for
the score and one for the value: 2 * 2D FLOPs. Backward has four such products (for the gradients of scores,
v, q and k). Together this is 12D. Scores that flash attention computes again in backward are recomputation
and are not counted. Softmax, masks and norms are not counted, because they are no GEMMs.

Only visible pairs count: L(L + 1) / 2 for a document of L tokens, which is half of the often-used L * L, and
fewer in a layer with a window.
"""

import numpy as np
import numpy.typing as npt

from lptune.models.facts import Facts


def attention_flops(facts: Facts, lengths: npt.ArrayLike) -> float:
    """FLOPs of the attention of all layers, forward and backward. lengths: of the documents, in tokens."""
    lengths_N = np.asarray(lengths, dtype=np.int64)
    pairs = {window: _num_pairs(lengths_N, window) for window in {layer.window for layer in facts.layers}}
    per_pair = 12.0 * facts.num_heads * facts.head_dim
    return per_pair * sum(pairs[layer.window] for layer in facts.layers)


def _num_pairs(lengths_N: npt.NDArray[np.int64], window: int | None) -> int:
    """The number of pairs of a query and a visible key."""
    reach_N = lengths_N if window is None else np.minimum(lengths_N, window)
    return int((reach_N * (reach_N + 1) // 2 + (lengths_N - reach_N) * reach_N).sum())
