"""Chooses the next token of each row from its logits.

    z / r if z > 0, else z * r      for the tokens that the row has, its prompt included; repetition penalty r
                                    (Keskar et al. 2019, arXiv:1909.05858)
    p = softmax(z / T)              temperature T; at T = 0 the token with the largest logit is taken (greedy)
    top-k: the k most probable tokens keep their probability          (Fan et al. 2018, arXiv:1805.04833)
    top-p: of these, the fewest most probable that sum to at least p  (Holtzman et al. 2020, arXiv:1904.09751)
    min-p: of these, those with at least this share of the largest p  (Nguyen et al. 2024, arXiv:2407.01082)
    p is divided by the sum of what is kept, and a token is drawn

The order is that of transformers. A draw inverts the distribution function: u is uniform in
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


def penalized(logits_BV: Tensor, rows: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """The logits, float32 (B, V), with those of the tokens in each of `rows` divided by `penalty` where they
    are positive, and multiplied elsewhere. logits_BV: any float dtype.
    """
    is_seen_BV = torch.zeros(logits_BV.shape, dtype=torch.bool)
    for is_seen_V, row in zip(is_seen_BV, rows, strict=True):
        is_seen_V[list(row)] = True
    z_BV = logits_BV.float()
    return torch.where(
        is_seen_BV.to(z_BV.device), torch.where(z_BV < 0, z_BV * penalty, z_BV / penalty), z_BV
    )


def probabilities(
    logits_BV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The distribution that `Sampler` draws from, sorted: (probabilities, float64 (B, V), from the largest
    on, and their tokens, int64 (B, V)). Of equal probabilities the smaller token comes first.

    logits_BV: any float dtype. temperature: above 0. top_k: 0: all. top_p: above 0; 1: all. min_p: 0: all.
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
    if min_p:
        p_BV = torch.where(p_BV < min_p * p_BV[:, :1], 0.0, p_BV)
        p_BV /= p_BV.sum(dim=-1, keepdim=True)
    return p_BV, tokens_BV


class Sampler:
    """Draws the tokens of a batch, one for each row at each call.

    seed, rows: the seed of the job and the number of each row in it, which decide the random numbers.
    """

    def __init__(self, cfg: SamplingConfig, seed: int, rows: Sequence[int]) -> None:
        self._cfg = cfg
        self._generators = [np.random.default_rng([seed, row]) for row in rows]

    def __call__(self, logits_BV: Tensor, rows: Sequence[Sequence[int]] = ()) -> Tensor:
        """The next token of each row, int64 (B,). logits_BV: any float dtype. rows: the tokens that each row
        has so far, its prompt included; only a repetition penalty needs them.
        """
        cfg = self._cfg
        if cfg.repetition_penalty != 1:
            logits_BV = penalized(logits_BV, rows, cfg.repetition_penalty)
        if not cfg.temperature:
            return logits_BV.argmax(dim=-1)
        p_BV, tokens_BV = probabilities(logits_BV, cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
        u_B1 = torch.tensor([[each.random()] for each in self._generators], dtype=torch.float64)
        below_BV = p_BV.cumsum(dim=-1)
        chosen_B1 = torch.searchsorted(below_BV, u_B1.to(below_BV.device), right=True)
        # Rounding may end the sums just below 1, and u may lie between: then the last kept token is meant.
        num_kept_B1 = (p_BV > 0).sum(dim=-1, keepdim=True)
        return tokens_BV.gather(1, torch.minimum(chosen_B1, num_kept_B1 - 1))[:, 0]
