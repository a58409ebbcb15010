"""Decoding: from prompts to answers, one token for each row of a batch at a time.

The first forward runs the prompts and fills the model's cache. Each later forward runs one new token per
row; of a model without a cache, the whole row. A row that has ended runs on, unread, until all rows have; its
answer takes no more tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lptune.inference.answer import Answer
from lptune.inference.sampling import Sampler
from lptune.models import Backbone


@torch.no_grad()
def decode(
    model: Backbone, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], sample: Sampler
) -> Iterator[None]:
    """Adds tokens to `answers` until all of them are done; yields after each token.

    model: not sharded. prompts: token ids, at least one in each row, of any lengths; without prompts, nothing
    is done. answers: new, one for each prompt. In float32, an answer does not depend on the other rows,
    up to the rounding of logits that tie. Kinds with one scale for all tokens (`int8_tensorwise`) quantize a
    row by the largest value of all.
    """
    rows = [list(prompt) for prompt in prompts]
    device = next(model.parameters()).device
    longest = max(map(len, rows), default=0) + max((answer.max_tokens for answer in answers), default=0)
    cache = None
    while not all(answer.is_done for answer in answers):
        if cache is None or cache.is_outgrown(list(map(len, rows))):
            cache = model.make_cache(len(rows), longest)
            tokens_BS, lengths_B = padded(rows, device)
        else:
            tokens_BS, lengths_B = padded([row[-1:] for row in rows], device)
        next_B = sample(model.next_logits(tokens_BS, lengths_B, cache), rows)
        for row, answer, token in zip(rows, answers, next_B.tolist(), strict=True):
            row.append(token)
            answer.piece = ""
            if not answer.is_done:
                answer.add(token)
        yield


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows, padded on the right with zeros, int64 (B, S), and their lengths, int64 (B,)."""
    lengths_B = torch.tensor([len(row) for row in rows])
    tokens_BS = torch.zeros(len(rows), int(lengths_B.max()), dtype=torch.int64)
    for tokens_S, row in zip(tokens_BS, rows, strict=True):
        tokens_S[: len(row)] = torch.tensor(row)
    return tokens_BS.to(device), lengths_B.to(device)
