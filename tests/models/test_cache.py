"""Logits from the key-value cache equal those of a forward of the whole row, in every family."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from lptune.models import Decoder, KVCache, config_from_dict
from tests.helpers.models_oracle import CHECKPOINTS, random_tokens, twins

CPU = torch.device("cpu")
ATOL = 1e-5
"""Logits are near 1. A float32 rounding is 6e-8, and the two orders of summation differ in about a hundred
roundings, in attention and in the GEMMs, whose number of rows differs."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    return twins(CHECKPOINTS[request.param]).ours


def next_logits(model: Decoder, cache: KVCache, rows: Sequence[Tensor], pad: int = 7) -> Tensor:
    """The logits after `rows`, which follow the tokens in the cache."""
    lengths_B = torch.tensor([len(row) for row in rows])
    tokens_BS = torch.full((len(rows), int(lengths_B.max())), pad)
    for tokens_S, row in zip(tokens_BS, rows, strict=True):
        tokens_S[: len(row)] = row
    return model.next_logits(tokens_BS, lengths_B, cache)


@torch.no_grad()
def test_cached_logits_equal_a_forward_of_the_whole_row(model: Decoder) -> None:
    tokens_BS = random_tokens(3, 48)
    prompts, num_steps = (9, 21, 1), 24  # windows are 16 tokens
    cache = KVCache(model.config, 3, max(prompts) + num_steps, CPU, torch.float32)
    found = [next_logits(model, cache, [row[:n] for row, n in zip(tokens_BS, prompts, strict=True)])]
    for step in range(num_steps):
        rows = [row[n + step : n + step + 1] for row, n in zip(tokens_BS, prompts, strict=True)]
        found.append(next_logits(model, cache, rows))
    for row, length in enumerate(prompts):
        # longrope: the caller computes an outgrown row anew, see test_decode
        outgrown = (step for step in range(len(found)) if cache.is_outgrown([length + step]))
        if num_found := next(outgrown, len(found)):
            whole_SV = model(tokens_BS[row : row + 1, : length + num_found - 1])[0, length - 1 :]
            of_row_SV = torch.stack([logits_BV[row] for logits_BV in found[:num_found]])
            torch.testing.assert_close(of_row_SV, whole_SV, rtol=0, atol=ATOL)


@torch.no_grad()
def test_several_tokens_can_follow_a_filled_cache(model: Decoder) -> None:
    tokens_BS = random_tokens(2, 30)
    cache = KVCache(model.config, 2, 40, CPU, torch.float32)
    next_logits(model, cache, [tokens_BS[0, :4], tokens_BS[1, :11]])
    logits_BV = next_logits(model, cache, [tokens_BS[0, 4:22], tokens_BS[1, 11:13]])
    torch.testing.assert_close(logits_BV[0], model(tokens_BS[:1, :22])[0, -1], rtol=0, atol=ATOL)
    torch.testing.assert_close(logits_BV[1], model(tokens_BS[1:, :13])[0, -1], rtol=0, atol=ATOL)


@torch.no_grad()
def test_a_short_row_does_not_get_the_rotation_of_a_long_one_beside_it(model: Decoder) -> None:
    tokens_BS = random_tokens(2, 40)  # beyond longrope's original length of 32
    cache = KVCache(model.config, 2, 40, CPU, torch.float32)
    logits_BV = next_logits(model, cache, [tokens_BS[0], tokens_BS[1, :5]])
    torch.testing.assert_close(logits_BV[0], model(tokens_BS[:1])[0, -1], rtol=0, atol=ATOL)
    torch.testing.assert_close(logits_BV[1], model(tokens_BS[1:, :5])[0, -1], rtol=0, atol=ATOL)


def test_only_a_row_that_just_passed_the_original_length_of_longrope_is_outgrown() -> None:
    longrope, other = (
        KVCache(config_from_dict(CHECKPOINTS[name]), 2, 1, CPU, torch.float32)
        for name in ("llama-longrope", "llama3_2-tiny")  # original length 32; none
    )
    assert [n for n in range(64) if longrope.is_outgrown([5, n])] == [33]
    assert not other.is_outgrown(range(64))
