"""What attention computes: the FLOPs that are no linear layer's.

A query that sees a key costs, in each query head, a product of D numbers for the score and one for the value:
2 * 2D FLOPs forward. Backward has four such products (for the gradients of scores, v, q and k), which makes
12D for forward and backward. The scores that flash attention makes a second time are recomputation, which is
not counted; nor are softmax, masks and norms, which are no GEMMs.

Only pairs that see each other count: L(L + 1) / 2 of a document of L tokens, half of the square that is often
counted, and fewer in a layer with a window.
"""

import numpy as np
import numpy.typing as npt

from lptune.models.config import DecoderConfig


def attention_flops(config: DecoderConfig, lengths: npt.ArrayLike) -> float:
    """Of forward and backward through the attention of all layers; lengths: of the documents, in tokens."""
    lengths_N = np.asarray(lengths, dtype=np.int64)
    pairs = {window: _num_pairs(lengths_N, window) for window in {layer.window for layer in config.layers}}
    per_pair = 12.0 * config.num_heads * config.head_dim
    return per_pair * sum(pairs[layer.window] for layer in config.layers)


def _num_pairs(lengths_N: npt.NDArray[np.int64], window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    reach_N = lengths_N if window is None else np.minimum(lengths_N, window)
    return int((reach_N * (reach_N + 1) // 2 + (lengths_N - reach_N) * reach_N).sum())
