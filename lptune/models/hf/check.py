"""Does this model keep the documents of a packed row apart, and does it compute what transformers does?

Both are tried before a run begins, on a twin: the model of the same config.json with one block of each kind,
few words and few experts, short windows and random weights, in float32 on the CPU. A packed row must give the
hidden states that transformers' own attention gives for each document alone. Masks, positions, windows and
recurrent states are the same code in the twin; sizes are not what fails. A second or two.

A model whose documents leak trains, and its loss falls; only the result is wrong.
"""

import functools
import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.text import first_line
from lptune.models.backbone import build_on_meta
from lptune.models.documents import DocumentBounds
from lptune.models.hf.facts import HFFacts, quiet

LIMIT = 1e-3
"""Of the difference, relative to the largest hidden state. Rounding in float32 makes some 1e-6, a document
that sees another one 1e-2 or more."""

_LENGTHS = ((9, 4, 11), (3, 21))
_NUM_WORDS, _NUM_EXPERTS = 64, 8
_FEWER: dict[str, int] = {
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "num_experts": _NUM_EXPERTS,
    "num_local_experts": _NUM_EXPERTS,
    "n_routed_experts": _NUM_EXPERTS,
    "moe_num_experts": _NUM_EXPERTS,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_SEEDS = (0, 1, 2)


def check(facts: HFFacts) -> None:
    """Raises UserError if the twin's packed rows differ from its documents alone, or it does not run. The
    first rank of a machine speaks for all.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        model = _model(_twin(facts))
        # A token that two experts suit equally well may go to another one by a rounding: not for all seeds.
        differs = all(_difference(model, seed) > LIMIT for seed in _SEEDS)
    except UserError:
        raise
    except Exception as error:  # whatever a model of transformers raises
        raise UserError(
            f"{facts.where}: {facts.family!r} does not run with lptune's attention and masks "
            f"({first_line(error)}); this model cannot be trained"
        ) from None
    if differs:
        raise UserError(
            f"{facts.where}: {facts.family!r} does not keep the documents of a packed row apart, or its "
            "attention differs from transformers'; this model cannot be trained"
        )


@functools.lru_cache(maxsize=8)
@torch.no_grad()
def caches_exactly(facts: HFFacts) -> bool:
    """Whether the twin's hidden states, with a cache of past tokens, are those of whole rows. Generation
    asks; a model of which this is not known runs whole rows.
    """
    try:
        model = _model(_twin(facts))
        return any(_cache_is_exact(model, seed) for seed in _SEEDS)
    except Exception:  # whatever a model of transformers raises
        return False


def _cache_is_exact(model: Any, seed: int) -> bool:
    """Two prompts of other lengths, padded, and three tokens that follow each."""
    tokens_BS = _draw(model, seed)
    prompts_B = torch.tensor([sum(_LENGTHS[0]) - 3, 13])
    cache = model.new_cache(2, tokens_BS.shape[1])
    found = [model.extend(tokens_BS[:, : prompts_B[0]], prompts_B, cache)]
    for more in range(3):
        new_B1 = tokens_BS.gather(1, prompts_B[:, None] + more)
        found.append(model.extend(new_B1, torch.ones_like(prompts_B), cache))
    whole_BSH = model.body(tokens_BS)
    worst = 0.0
    for row, length in enumerate(prompts_B.tolist()):
        found_SH = torch.cat([found[0][row, :length], *(each[row] for each in found[1:])])
        worst = max(worst, float((found_SH - whole_BSH[row, : length + 3]).abs().max()))
    return worst <= LIMIT * float(whole_BSH.abs().max())


def _model(twin: HFFacts) -> Any:
    model = build_on_meta(twin.with_layers(twin.one_of_each())).to_empty(device="cpu")
    model.reset_buffers("cpu")
    return model


def _twin(facts: HFFacts) -> HFFacts:
    """The facts of the small model. Its experts are as many as in the model if fewer do not fit together."""
    from lptune.models.hf.model import facts_of

    content: dict[str, Any] = json.loads(facts.content)
    words: dict[str, Any] = {
        key: 0 if isinstance(value, int) else None
        for key, value in content.items()
        if key.endswith("token_id")
    }
    words |= {key: _NUM_WORDS for key in ("vocab_size", "vocab_size_per_layer_input") if key in content}
    fewer = {
        key: min(value, content[key]) for key, value in _FEWER.items() if isinstance(content.get(key), int)
    }
    if "n_group" in content:
        fewer |= {"n_group": 1, "topk_group": 1}
    used = content.get("num_experts_per_tok")
    changes = [words | fewer, words] if not isinstance(used, int) or used <= _NUM_EXPERTS else [words]
    for change in changes:
        try:
            return facts_of(json.dumps(content | change), facts.where, ())
        except UserError:
            if change is changes[-1]:
                raise
    raise AssertionError


@torch.no_grad()
def _draw(model: Any, seed: int) -> Tensor:
    """Gives `model` random weights; returns random rows, as long as those of _LENGTHS."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=draw)
        else:
            parameter.uniform_(0.5, 1.5, generator=draw)
    return torch.randint(1, _NUM_WORDS, (len(_LENGTHS), sum(_LENGTHS[0])), generator=draw)


@torch.no_grad()
def _difference(model: Any, seed: int) -> float:
    """The largest difference between a packed row and its documents alone, of the largest hidden state."""
    tokens_BS = _draw(model, seed)
    seq_len = tokens_BS.shape[1]
    packed_BSH = model.body(tokens_BS, _bounds(seq_len))
    if not packed_BSH.isfinite().all():
        return math.inf
    worst = largest = 0.0
    for row, lengths in enumerate(_LENGTHS):
        start = 0
        for length in lengths:
            alone_SH = _alone(model, tokens_BS[row : row + 1, start : start + length])
            if not alone_SH.isfinite().all():  # `max` would leave a NaN out
                return math.inf
            found_SH = packed_BSH[row, start : start + length]
            worst = max(worst, float((found_SH - alone_SH).abs().max()))
            largest = max(largest, float(alone_SH.abs().max()))
            start += length
    return worst / largest if largest > 0 else math.inf


def _bounds(seq_len: int) -> DocumentBounds:
    positions = [[place for length in row for place in range(length)] for row in _LENGTHS]
    index = [[number for number, length in enumerate(row) for _ in range(length)] for row in _LENGTHS]
    starts = [
        row * seq_len + sum(lengths[:number])
        for row, lengths in enumerate(_LENGTHS)
        for number in range(len(lengths))
    ]
    num_tokens = seq_len * len(_LENGTHS)
    offsets = starts + [num_tokens] * (num_tokens + 1 - len(starts))
    return DocumentBounds(
        torch.tensor(positions), torch.tensor(index), torch.tensor(offsets, dtype=torch.int32)
    )


def _alone(model: Any, tokens_1S: Tensor) -> Tensor:
    """The hidden states of one document (S, H) by transformers' own attention and masks."""
    config = model.get_submodule(model.body_name).config
    before = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        with quiet():
            found = model.get_submodule(model.body_name)(input_ids=tokens_1S, use_cache=False)
    finally:
        config._attn_implementation = before
    alone_SH: Tensor = found.last_hidden_state[0]
    return alone_SH
