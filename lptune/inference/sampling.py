"""Chooses the next token of each row from its logits.

    p = softmax(z / T)              temperature T; at T = 0 the token with the largest logit is taken (greedy)
    top-k: the k most probable tokens keep their probability          (Fan et al. 2018, arXiv:1805.04833)
    top-p: of these, the fewest most probable that sum to at least p  (Holtzman et al. 2020, arXiv:1904.09751)
    p is divided by the sum of what is kept, and a token is drawn

The order of the three is that of transformers. A draw inverts the distribution function: u is uniform in
[0, 1), and the drawn token is the first whose cumulative probability exceeds u.

The numbers u of a row depend on (seed, number of the row) alone, so its answer does not depend on the other
rows of the batch, on the batch size, or on where an interrupted job continued.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lptune.config import SamplingConfig


def probabilities(
    logits_BV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The distribution that `Sampler` draws from, sorted: (probabilities, float64 (B, V), from the largest
    on, and their tokens, int64 (B, V)). Of equal probabilities the smaller token comes first.

    logits_BV: any float dtype. temperature: above 0. top_k: 0: all. top_p: above 0; 1: all.
    """
    p_BV = torch.softmax(logits_BV.double() / temperature, dim=-1)
    p_BV, tokens_BV = p_BV.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < p_BV.shape[1]:
        p_BV[:, top_k:] = 0
        p_BV /= p_BV.sum(dim=-1, keepdim=True)
    if top_p < 1:
        before_BV = p_BV.cumsum(dim=-1) - p_BV  # the most probable token has 0 before it, and always stays
        p_BV = torch.where(before_BV < top_p, p_BV, 0.0)
        p_BV /= p_BV.sum(dim=-1, keepdim=True)
    return p_BV, tokens_BV


class Sampler:
    """Draws the tokens of a batch, one for each row at each call.

    seed, rows: the seed of the job and the number of each row in it, which decide the random numbers.
    """

    def __init__(self, cfg: SamplingConfig, seed: int, rows: Sequence[int]) -> None:
        self._cfg = cfg
        self._generators = [np.random.default_rng([seed, row]) for row in rows]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """The next token of each row, int64 (B,). logits_BV: any float dtype."""
        cfg = self._cfg
        if not cfg.temperature:
            return logits_BV.argmax(dim=-1)
        p_BV, tokens_BV = probabilities(logits_BV, cfg.temperature, cfg.top_k, cfg.top_p)
        u_B1 = torch.tensor([[each.random()] for each in self._generators], dtype=torch.float64)
        below_BV = p_BV.cumsum(dim=-1)
        chosen_B1 = torch.searchsorted(below_BV, u_B1.to(below_BV.device), right=True)
        # Rounding may end the sums just below 1, and u may lie between: then the last kept token is meant.
        num_kept_B1 = (p_BV > 0).sum(dim=-1, keepdim=True)
        return tokens_BV.gather(1, torch.minimum(chosen_B1, num_kept_B1 - 1))[:, 0]
