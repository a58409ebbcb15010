"""The teacher's k most probable words of each token, as numbers that serve any temperature.

Let x be the teacher's logits of a token, z = logsumexp(x), and l = x - z its log-probabilities. Stored are

    l_i                                  of the k largest, and the words i they belong to
    log of sum_j exp(l_j / T)            over all other words j, for a few temperatures T

At temperature T the teacher's probability of word i is exp(l_i / T) / Z with Z = sum over all words of
exp(l_j / T). The k words give their part of Z, the second line gives the rest. The k words alone would not:
how much of Z the others have depends on how flat the tail is. At T = 1 the rest is the probability that the
word is none of the k, which 1 - sum of p_i would lose where it is small.

Fewer than k words can be used, too: the others of the k then join the rest.

Shapes: T tokens, t tokens of a chunk, k words, M temperatures, H hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lptune.models import Backbone
from lptune.models.chunks import max_logits_per_chunk
from lptune.models.words import words_of

TEMPERATURES = (1.0, 2.0, 4.0)
"""Temperatures for which the rest is always stored. `distillation.temperature` is added if it is another."""


class TopK(NamedTuple):
    """The k most probable words of T tokens."""

    log_p_Tk: Tensor
    """Log-probabilities at temperature 1, the largest first."""
    words_Tk: Tensor
    """int32."""
    log_rest_TM: Tensor
    """log of sum_j exp(l_j / T) over the other words, for each temperature; -inf if there are none."""


@torch.no_grad()
def top_k(
    teacher: Backbone, hidden_TH: Tensor, k: int, temperatures: tuple[float, ...], dtype: torch.dtype
) -> TopK:
    """The k most probable words of each token, on the device of `hidden_TH`.

    hidden_TH: last hidden states of the teacher (`Backbone.hidden_states`). dtype: of the log-probabilities;
    they are computed in float32. A probability of 0 becomes the smallest number of `dtype`. With a cut
    vocabulary a collective of the ranks that share it.
    """
    words = words_of(teacher.head, teacher.facts.vocab_size)
    num_rows = max(1, max_logits_per_chunk(hidden_TH.device) // (4 * teacher.facts.vocab_size))
    parts = []
    for hidden_tH in hidden_TH.split(num_rows) if len(hidden_TH) else [hidden_TH]:
        x_tV = words.gather(teacher.logits_of(hidden_tH)).float()
        l_tV = x_tV - x_tV.logsumexp(1, keepdim=True)
        log_p_tk, words_tk = l_tV.topk(k, dim=1)
        rest_tV = l_tV.scatter_(1, words_tk, -torch.inf)
        log_rest_tM = torch.stack([(rest_tV / each).logsumexp(1) for each in temperatures], 1)
        parts.append((log_p_tk.clamp(min=torch.finfo(dtype).min).to(dtype), words_tk.int(), log_rest_tM))
    log_p_Tk, words_Tk, log_rest_TM = (torch.cat(each) for each in zip(*parts, strict=True))
    return TopK(log_p_Tk, words_Tk, log_rest_TM.to(dtype))


def at_temperature(log_p_Tk: Tensor, log_rest_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, k) at `temperature`, and (T,) of all other words together. float32.

    log_rest_T: the column of `TopK.log_rest_TM` for `temperature`. The k + 1 results add up to 1, which also
    takes out what rounding to float16 has left over.
    """
    all_Tn = torch.cat([log_p_Tk.float() / temperature, log_rest_T.float()[:, None]], 1)
    all_Tn = all_Tn - all_Tn.logsumexp(1, keepdim=True)
    return all_Tn[:, :-1], all_Tn[:, -1]


def fewer(found: TopK, k: int, temperatures: tuple[float, ...]) -> TopK:
    """The k most probable words of `found`, which has at least as many; the others join the rest."""
    if k == found.words_Tk.shape[1]:
        return found
    others_Tn = found.log_p_Tk[:, k:].float()
    joined = [
        torch.cat([others_Tn / each, found.log_rest_TM[:, m : m + 1].float()], 1).logsumexp(1)
        for m, each in enumerate(temperatures)
    ]
    return TopK(found.log_p_Tk[:, :k], found.words_Tk[:, :k], torch.stack(joined, 1))
