"""Tokens are drawn from the right distribution, and a row's tokens depend on nothing but itself."""

import pytest
import torch

from lptune.config import SamplingConfig
from lptune.inference import Sampler, probabilities

LOGITS_V = torch.tensor([1.3, -0.4, 2.1, 0.0, 1.9, -2.5, 0.7, 2.1])


def test_probabilities_equal_those_of_transformers() -> None:
    import transformers

    logits_BV = 3 * torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    for temperature, top_k, top_p, min_p in [
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (0.9, 20, 0.6, 0.0),
        (2.0, 1, 0.1, 0.0),
        (1.5, 0, 1.0, 0.1),
        (1.2, 30, 0.9, 0.05),
        (0.8, 0, 1.0, 1.0),
    ]:
        steps = [transformers.TemperatureLogitsWarper(temperature)]
        steps += [transformers.TopKLogitsWarper(top_k)] if top_k else []
        steps += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
        steps += [transformers.MinPLogitsWarper(min_p)] if min_p else []
        theirs_BV = transformers.LogitsProcessorList(steps)(None, logits_BV).softmax(dim=-1)
        p_BV, tokens_BV = probabilities(logits_BV, temperature, top_k, top_p, min_p)
        ours_BV = torch.zeros_like(p_BV).scatter(1, tokens_BV, p_BV)
        torch.testing.assert_close(ours_BV, theirs_BV.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_repetition_penalty_takes_the_token_of_transformers(penalty: float) -> None:
    """Of each prompt's length; float32 logits, so that ties and signs are the same."""
    import transformers

    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(20, 30, generator=generator)
    rows = [torch.randint(30, (1 + n,), generator=generator).tolist() for n in range(20)]
    sampler = Sampler(SamplingConfig(repetition_penalty=penalty), 0, range(20))
    theirs = [
        int(processor(torch.tensor([row]), logits_V[None]).argmax())
        for row, logits_V in zip(rows, logits_BV, strict=True)
    ]
    assert sampler(logits_BV, rows).tolist() == theirs
    assert theirs != logits_BV.argmax(dim=-1).tolist()
    assert Sampler(SamplingConfig(), 0, range(20))(logits_BV, rows).tolist() == logits_BV.argmax(-1).tolist()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 5, 1.0), (1.5, 0, 0.75)])
def test_draws_have_the_exact_frequencies(temperature: float, top_k: int, top_p: float) -> None:
    """Pearson's chi-square against probabilities computed here, in float64."""
    num_rows, num_draws = 40, 500
    p = (LOGITS_V.double() / temperature).exp()
    order = sorted(range(8), key=lambda token: (-float(p[token]), token))
    kept, total = list[int](), 0.0
    limit = top_p * float(sum(p[token] for token in order[: top_k or 8]))
    for token in order[: top_k or 8]:
        if total < limit:
            kept.append(token)
            total += float(p[token])
    assert 2 < len(kept) <= 8

    sampler = Sampler(
        SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p), seed=5, rows=range(num_rows)
    )
    logits_BV = LOGITS_V.expand(num_rows, 8)
    drawn = torch.stack([sampler(logits_BV) for _ in range(num_draws)]).flatten()
    counts = drawn.bincount(minlength=8).tolist()
    assert [token for token in range(8) if counts[token]] == sorted(kept)
    n = num_rows * num_draws
    chi_square = sum((counts[t] - n * float(p[t]) / total) ** 2 / (n * float(p[t]) / total) for t in kept)
    # Degrees of freedom d: mean d, variance 2 d. Five standard deviations; the draws are seeded.
    d = len(kept) - 1
    assert chi_square < d + 5 * (2 * d) ** 0.5


def test_a_row_draws_the_same_whatever_rows_stand_beside_it() -> None:
    cfg = SamplingConfig(temperature=1.0)
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    together, alone = Sampler(cfg, 3, range(10, 16)), Sampler(cfg, 3, [14])
    others = [Sampler(cfg, 4, [14]), Sampler(cfg, 3, [13])]
    drawn = [(int(together(logits_BV)[4]), int(alone(logits_BV[4:5]))) for _ in range(30)]
    assert all(a == b for a, b in drawn)
    for other in others:  # another seed, another row
        assert [int(other(logits_BV[4:5])) for _ in range(30)] != [a for a, _ in drawn]
