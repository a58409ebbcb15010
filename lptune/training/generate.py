"""Greedy answers to a few prompts, as samples besides the loss.

Each new token runs the whole row again, without a key-value cache, so a sample costs one forward of its
length for each token. This is good enough for twenty short prompts. For more there is inference.decode, which
has a cache. It does not serve a model in training: that is compiled for rows of one length, FSDP gathers its
weights by hooks on `forward`, and sequence parallelism cuts rows over ranks, where a new token is one.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lptune.training.evaluating import evaluating


@evaluating
def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    multiple_of: int = 1,
) -> list[list[int]]:
    """The greedy continuation of each prompt, up to (without) its first stop token.

    model: called as model(tokens_BS) -> logits (B, S, V). Rows are padded on the right; causal attention
    keeps the padding out of every token that is read. multiple_of: the length of rows is a multiple of it
    (for sequence parallelism).
    """
    if not prompts:
        return []
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    length = -(-(int(lengths.max()) + max_new_tokens) // multiple_of) * multiple_of
    tokens_BS = torch.full((len(prompts), length), pad_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    stops = torch.tensor(sorted(set(stop_ids)), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for offset in range(max_new_tokens):
        logits_BSV: Tensor = model(tokens_BS)
        next_B = logits_BSV[rows, lengths + offset - 1].argmax(dim=-1)
        if dist.is_initialized():
            # Ranks that add in another order may break a tie differently, and would diverge here.
            dist.broadcast(next_B, 0)
        tokens_BS[rows, lengths + offset] = next_B
        done |= torch.isin(next_B, stops)
        if done.all():
            break
    answers = []
    for row, start in enumerate(lengths.tolist()):
        answer = tokens_BS[row, start : start + max_new_tokens].tolist()
        ends = [i for i, token in enumerate(answer) if token in set(stop_ids)]
        answers.append(answer[: ends[0]] if ends else answer)
    return answers
