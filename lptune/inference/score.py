"""Scores continuations: how probable a text is after a context, and whether greedy decoding would write it.

    log p(continuation | context) = sum over its tokens of log softmax(logits before the token)[token]

The logits before the last token of a continuation do not depend on that token. So continuations that differ
in their last token alone share one forward: the choices A, B, C, D of a question cost one row, not four. Rows
of similar length share a batch, the longest first, so that a batch that does not fit in memory fails at once.

A row keeps the last `max_length` tokens of context and continuation (without the last token, which is only
predicted), as lm_eval's model `hf` does: the beginning of a long context is dropped.

Shapes: B rows, S tokens, T scored tokens of a batch, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from lptune.distributed import World
from lptune.inference.decode import padded
from lptune.inference.rounds import in_batches, rounds
from lptune.models import Backbone

_MAX_LOGITS = 2**26
"""Float32 logits that are in memory at once: 256 MiB."""


class Pair(NamedTuple):
    """Token ids of a context and of the continuation to score; at least one token in each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Scored(NamedTuple):
    """The score of a continuation."""

    log_probability: float
    """In nats, summed over its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one."""


class _Row(NamedTuple):
    """The input of a forward, and the pairs that it scores."""

    ids: tuple[int, ...]
    pairs: list[tuple[int, Sequence[int]]]
    """(number of the pair, its continuation)."""


def score(
    model: Backbone, pairs: Sequence[Pair], world: World, *, batch_size: int, max_length: int
) -> list[Scored]:
    """The scores of `pairs`, in their order, on every rank. A collective: the ranks share the rows.

    model: not sharded, whole on each rank. batch_size: rows of a forward. max_length: most tokens of a row;
    no continuation may have more. Raises UserError, which names harness.tasks, if ranks have other pairs.
    """
    rows = sorted(_rows(pairs, max_length), key=lambda row: (-len(row.ids), row.ids))
    found: dict[int, Scored] = {}
    with tqdm(total=len(pairs), desc="scored", disable=None if world.is_main else True) as bar:
        for batches in rounds(in_batches(rows, batch_size), world, "harness.tasks"):
            mine = [(number, *scored) for number, scored in _scored(model, batches[world.data_rank])]
            for of_rank in world.gather(mine):
                found |= {number: Scored(*scored) for number, *scored in of_rank}
            bar.update(len(found) - bar.n)
    return [found[number] for number in range(len(pairs))]


def _rows(pairs: Sequence[Pair], max_length: int) -> list[_Row]:
    rows: dict[tuple[int, ...], _Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        assert context, "a context has at least one token"
        assert 0 < len(continuation) <= max_length, (len(continuation), max_length)
        ids = tuple([*context, *continuation][-(max_length + 1) : -1])
        rows.setdefault(ids, _Row(ids, [])).pairs.append((number, continuation))
    return list(rows.values())


@torch.no_grad()
def _scored(model: Backbone, rows: Sequence[_Row]) -> Iterator[tuple[int, Scored]]:
    """(number, score) of each pair of a batch."""
    if not rows:
        return
    tokens_BS, lengths_B = padded([row.ids for row in rows], next(model.parameters()).device)
    hidden_BSH = model.extend(tokens_BS, lengths_B, model.make_cache(*tokens_BS.shape))
    # One entry for each token of each continuation: its row, the place before it, and the token itself.
    numbers, in_rows, places, targets = list[int](), list[int](), list[int](), list[int]()
    for row_number, row in enumerate(rows):
        for number, continuation in row.pairs:
            length = len(continuation)
            numbers += [number] * length
            in_rows += [row_number] * length
            places += range(len(row.ids) - length, len(row.ids))
            targets += continuation
    hidden_TH = hidden_BSH[torch.tensor(in_rows), torch.tensor(places)]
    log_p_T, is_greedy_T = _of_targets(model, hidden_TH, torch.tensor(targets, device=hidden_TH.device))
    sums: dict[int, Scored] = {}
    for number, log_p, is_greedy in zip(numbers, log_p_T.tolist(), is_greedy_T.tolist(), strict=True):
        before = sums.get(number, Scored(0.0, True))
        sums[number] = Scored(before.log_probability + log_p, before.is_greedy and is_greedy)
    yield from sums.items()


def _of_targets(model: Backbone, hidden_TH: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, float32, and whether it is the most probable token, (T,) each."""
    size = max(1, _MAX_LOGITS // model.facts.vocab_size)
    parts = []
    for hidden_tH, targets_t in zip(hidden_TH.split(size), targets_T.split(size), strict=True):
        logits_tV = model.logits_of(hidden_tH).float()
        log_p_t = torch.log_softmax(logits_tV, dim=-1).gather(1, targets_t[:, None])[:, 0]
        parts.append((log_p_t, logits_tV.argmax(dim=-1) == targets_t))
    return torch.cat([log_p for log_p, _ in parts]), torch.cat([greedy for _, greedy in parts])
