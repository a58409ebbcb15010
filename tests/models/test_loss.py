"""Objectives in chunks and blocks are those of PyTorch and transformers, in two copies of a chunk's logits.

Tolerances. Logits are float32 numbers and the truth is float64's of the same numbers, so what differs is
arithmetic. With u = 2**-24, V words and logits that lie within R of their token's largest, to first order:

    x - largest             off by u * R
    exp of it               by a factor of 1 + u * (R + 2), the function itself being exact to 2 u
    a sum of V of these     by a factor of 1 + u * (R + 2 + V), whatever the order
    its logarithm           by u * (R + 2 + V) + u * log V
    a log-probability       by u * (3 R + V + 2 log V + 2), its own rounding being u * (R + log V)

Softmax, and with it a gradient, is off by such a factor. A divergence sums p * (log p - log q), terms of at
most 2 R with two such factors, and is off by 2 R times as much and the two logarithms.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy

from lptune import models
from lptune.base.errors import UserError
from lptune.models import (
    Divergence,
    TopKDivergence,
    WeightedSum,
    log_probabilities,
    summed_cross_entropy,
)
from lptune.models.backbone import ChunkLoss
from lptune.models.chunks import Logits, in_chunks
from lptune.models.loss import is_number
from lptune.models.words import Words
from lptune.plan.memory import MemoryLog
from tests.helpers.models_oracle import CHECKPOINTS, random_labels, random_tokens, twins
from tests.helpers.slow import slow_but

V, T, K = 41, 37, 5


def log_p_tolerance(vocab_size: int, spread: float) -> float:
    return 2**-24 * (3 * spread + vocab_size + 2 * math.log(vocab_size) + 2)


def divergence_tolerance(vocab_size: int, spread: float) -> float:
    return (2 * spread + 2) * log_p_tolerance(vocab_size, spread)


def chunk_loss(vocab_size: int, softcap: float | None = None) -> ChunkLoss:
    return ChunkLoss(vocab_size, softcap=softcap)


def compute(
    objective: models.Objective,
    head: Callable[[Tensor], Tensor],
    hidden_TH: Tensor,
    labels_T: Tensor,
    vocab_size: int = V,
    *,
    softcap: float | None = None,
    max_logits: int | None = None,
) -> Tensor:
    """The objective as a Decoder computes it, its targets being (T, …)."""
    of_chunk = functools.partial(chunk_loss(vocab_size, softcap), head, objective)
    tensors = [hidden_TH, labels_T, *objective.targets]
    parameters = tuple(head.parameters()) if is_number(objective) and isinstance(head, nn.Module) else None
    return in_chunks(of_chunk, tensors, vocab_size, max_logits=max_logits, parameters=parameters)


def inputs(spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels of which some are -100, the teacher's logits."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(T, V, generator=generator) * spread
    teacher_TV = torch.randn(T, V, generator=generator) * spread
    labels_T = torch.randint(0, V, (T,), generator=generator)
    labels_T[torch.rand(T, generator=generator) < 0.3] = -100
    return logits_TV.requires_grad_(), labels_T, teacher_TV


def top_k(teacher_TV: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    log_p_Tk, words_Tk = torch.log_softmax(teacher_TV, -1).topk(k)
    return log_p_Tk, words_Tk


def top_k_truth(logits_TV: Tensor, log_p_Tk: Tensor, words_Tk: Tensor) -> Tensor:
    """F.kl_div over k + 1 events, float64."""
    log_q_TV = torch.log_softmax(logits_TV.double(), -1)
    is_rest_TV = torch.ones_like(log_q_TV, dtype=torch.bool).scatter(1, words_Tk, False)
    log_s_T1 = log_q_TV.masked_fill(~is_rest_TV, -torch.inf).logsumexp(1, keepdim=True)
    p_Tk = log_p_Tk.double().exp()
    p_Tk = torch.cat([p_Tk, (1 - p_Tk.sum(1, keepdim=True)).clamp(min=0)], 1)
    return F.kl_div(torch.cat([log_q_TV.gather(1, words_Tk), log_s_T1], 1), p_Tk, reduction="none").sum(1)


def top_k_and_rest(teacher_TV: Tensor, k: int = K, temperature: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and words of the k largest, and the log-probability of all others, in float32."""
    log_p_TV = torch.log_softmax(teacher_TV.double() / temperature, -1)
    log_p_Tk, words_Tk = log_p_TV.topk(k)
    log_r_T = log_p_TV.scatter(-1, words_Tk, -torch.inf).logsumexp(-1)
    return log_p_Tk.float(), words_Tk, log_r_T.float()


def mixed_top_k_truth(
    logits_TV: Tensor, log_p_Tk: Tensor, words_Tk: Tensor, log_r_T: Tensor, temperature: float = 2.0
) -> Tensor:
    """0.3 of the reverse divergence over k + 1 events, float64."""
    log_q_TV = torch.log_softmax(logits_TV.double() / temperature, -1)
    log_s_T1 = log_q_TV.scatter(1, words_Tk, -torch.inf).logsumexp(1, keepdim=True)
    log_q_Tn = torch.cat([log_q_TV.gather(1, words_Tk), log_s_T1], 1)
    log_p_Tn = torch.cat([log_p_Tk, log_r_T[:, None]], 1).double()
    difference_Tn = log_p_Tn - log_q_Tn
    return ((0.7 * log_p_Tn.exp() - 0.3 * log_q_Tn.exp()) * difference_Tn).sum(1)


class Case(NamedTuple):
    """How an objective is tested. A new objective needs a row of CASES, here and on a cut vocabulary."""

    make: Callable[..., models.Objective]
    """The objective, from the teacher's logits (T, V); if it has them as a copy, also from (hidden, head)."""
    truth: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logits_TV, labels_T, teacher_TV), float64 and labels >= 0 -> numbers for each token by PyTorch."""
    tolerance: Callable[[int, float], float]
    """(words of the vocabulary, spread of the logits) -> bound of the error of a number."""
    num_temporaries: float
    """Float32 tensors of a block that exist at once: soft-capped logits, log-probabilities, gradients of
    these; masks count a quarter.
    """
    is_sum: bool = False
    """Whether the result is the sum over all tokens."""
    num_copies: int = 2
    """Tensors of the size of a chunk's logits: the logits, a gradient for each objective, the teacher's."""


def _log_probability(logits_TV: Tensor, labels_T: Tensor, _: Tensor) -> Tensor:
    return torch.log_softmax(logits_TV, -1).gather(-1, labels_T[:, None])[:, 0]


def _divergence(logits_TV: Tensor, _: Tensor, teacher_TV: Tensor) -> Tensor:
    log_q_TV, log_p_TV = (torch.log_softmax(each, -1) for each in (logits_TV, teacher_TV))
    return F.kl_div(log_q_TV, log_p_TV, reduction="none", log_target=True).sum(1)


def _mixed_divergence(logits_TV: Tensor, labels_T: Tensor, teacher_TV: Tensor) -> Tensor:
    """0.3 of the reverse divergence, at temperature 2."""
    forward_T = _divergence(logits_TV / 2, labels_T, teacher_TV / 2)
    return 0.7 * forward_T + 0.3 * _divergence(teacher_TV / 2, labels_T, logits_TV / 2)


def _with_labels(logits_TV: Tensor, labels_T: Tensor, teacher_TV: Tensor) -> Tensor:
    loss_T = F.cross_entropy(logits_TV, labels_T, reduction="none")
    return 0.25 * loss_T + 0.75 * _divergence(logits_TV, labels_T, teacher_TV)


CASES = {
    "cross-entropy": Case(
        make=lambda _: summed_cross_entropy,
        truth=lambda logits_TV, labels_T, _: F.cross_entropy(logits_TV, labels_T, reduction="none"),
        tolerance=log_p_tolerance,
        num_temporaries=4,
        is_sum=True,
    ),
    "log-probabilities": Case(
        make=lambda _: log_probabilities,
        truth=_log_probability,
        tolerance=log_p_tolerance,
        num_temporaries=4,
    ),
    "divergence": Case(
        make=Divergence,
        truth=_divergence,
        tolerance=divergence_tolerance,
        num_temporaries=8.25,
        num_copies=3,
    ),
    "reverse divergence": Case(
        make=functools.partial(Divergence, reverse=1.0),
        truth=lambda logits_TV, labels_T, teacher_TV: _divergence(teacher_TV, labels_T, logits_TV),
        tolerance=divergence_tolerance,
        num_temporaries=10.25,
        num_copies=3,
    ),
    "divergence in both directions": Case(
        make=functools.partial(Divergence, reverse=0.3, temperature=2.0),
        truth=_mixed_divergence,
        tolerance=divergence_tolerance,
        num_temporaries=10.25,
        num_copies=3,
    ),
    "labels and divergence": Case(
        make=lambda *teacher: WeightedSum((-0.25, log_probabilities), (0.75, Divergence(*teacher))),
        truth=_with_labels,
        tolerance=divergence_tolerance,
        num_temporaries=8.25,
        num_copies=4,
    ),
    "top k": Case(
        make=lambda teacher_TV: TopKDivergence(*top_k(teacher_TV)),
        # The k log-probabilities are float32 numbers, which the objective is given.
        truth=lambda logits_TV, _, teacher_TV: top_k_truth(logits_TV, *top_k(teacher_TV.float())),
        tolerance=divergence_tolerance,
        num_temporaries=6.25,
    ),
    "top k in both directions": Case(
        make=lambda teacher_TV: TopKDivergence(*top_k_and_rest(teacher_TV), reverse=0.3, temperature=2.0),
        truth=lambda logits_TV, _, teacher_TV: mixed_top_k_truth(
            logits_TV, *top_k_and_rest(teacher_TV.float())
        ),
        tolerance=divergence_tolerance,
        num_temporaries=6.25,
    ),
}
OBJECTIVES = list(CASES)


def objectives(teacher_TV: Tensor) -> dict[str, models.Objective]:
    return {name: case.make(teacher_TV) for name, case in CASES.items()}


def truths(logits_TV: Tensor, labels_T: Tensor, teacher_TV: Tensor) -> dict[str, Tensor]:
    """Numbers for each token by PyTorch in float64, differentiable; 0 where the label is -100."""
    arguments = logits_TV.double(), labels_T.clamp(min=0), teacher_TV.double()
    found = {name: case.truth(*arguments) for name, case in CASES.items()}
    return {name: torch.where(labels_T == -100, 0.0, each) for name, each in found.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("max_logits", [None, V * 10], ids=["at once", "in chunks"])
def test_objectives_are_those_of_pytorch_in_float64(name: str, max_logits: int | None) -> None:
    logits_TV, labels_T, teacher_TV = inputs()
    objective = objectives(teacher_TV)[name]
    found = compute(objective, nn.Identity(), logits_TV, labels_T, max_logits=max_logits)
    truth_T = truths(logits_TV, labels_T, teacher_TV)[name]
    both = torch.stack([logits_TV.detach(), teacher_TV])
    spread = float((both.amax(-1) - both.amin(-1)).max())
    tolerance = CASES[name].tolerance(V, spread)
    assert found.dtype == torch.float32
    weight_T = torch.linspace(0.5, 1.5, T, dtype=torch.float64)
    if CASES[name].is_sum:
        assert abs(found.item() - truth_T.sum().item()) < T * tolerance + T * 2**-24 * truth_T.sum().item()
        weight_T = torch.ones_like(weight_T)
    else:
        assert found.shape == (T,)
        assert (found - truth_T).abs().max() < tolerance
        assert not found[labels_T == -100].any()
    weighted = found * weight_T.float() if found.dim() else found
    (gradient_TV,) = torch.autograd.grad(weighted.sum(), logits_TV)
    (truth_TV,) = torch.autograd.grad(truth_T @ weight_T, logits_TV)
    # p and q of at most 1, each off by a factor; times a weight of at most 1.5
    assert (gradient_TV - truth_TV).abs().max() < 1.5 * 2 * log_p_tolerance(V, spread)
    assert not gradient_TV[labels_T == -100].any()


def test_the_sum_is_the_loss_of_transformers() -> None:
    logits_TV, labels_T, _ = inputs()
    expected = fixed_cross_entropy(logits_TV, labels_T, num_items_in_batch=1)
    assert torch.equal(compute(summed_cross_entropy, nn.Identity(), logits_TV, labels_T), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_cross_entropy_has_the_bits_of_torch_in_value_and_gradients(
    dtype: torch.dtype, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lptune.models.chunks.MIN_LOGITS_PER_BLOCK", 1)  # 13 blocks of three rows
    torch.manual_seed(0)
    head = nn.Linear(16, V, dtype=dtype)
    hidden_TH = torch.randn(T, 16, dtype=dtype, requires_grad=True)
    labels_T = inputs()[1]
    logits_TV = head(hidden_TH).float()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    expected = F.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="sum")
    loss = compute(summed_cross_entropy, head, hidden_TH, labels_T, softcap=softcap)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, expected)
    for grad, expected_grad in zip(
        *(torch.autograd.grad(each * 0.37, [hidden_TH, head.weight]) for each in (loss, expected)),
        strict=True,
    ):
        assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_blocks_of_rows_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV, labels_T, teacher_TV = inputs()
    objective = objectives(teacher_TV)[name]
    found = []
    for min_logits in (1, 10 * V, 2**20):
        monkeypatch.setattr("lptune.models.chunks.MIN_LOGITS_PER_BLOCK", min_logits)
        result = compute(objective, nn.Identity(), logits_TV, labels_T, softcap=20.0)
        found.append((result, torch.autograd.grad(result.sum(), logits_TV)[0]))
    for result, gradient_TV in found[1:]:
        assert torch.equal(result, found[0][0])
        assert torch.equal(gradient_TV, found[0][1])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("num_tokens", [0, 8], ids=["no token", "labels of -100 alone"])
def test_nothing_to_predict_is_zero_with_zero_gradients(name: str, num_tokens: int) -> None:
    head = nn.Linear(16, V)
    hidden_TH = torch.randn(num_tokens, 16, requires_grad=True)
    objective = objectives(torch.randn(num_tokens, V))[name]
    labels_T = torch.full((num_tokens,), -100)
    found = compute(objective, head, hidden_TH, labels_T, max_logits=2 * V)
    assert found.shape == (() if CASES[name].is_sum else (num_tokens,))
    assert not found.any()
    for gradient in torch.autograd.grad(found.sum(), [hidden_TH, head.weight]):
        assert not gradient.any()


def test_a_teacher_can_be_its_hidden_states_and_a_head_in_chunks() -> None:
    logits_TV, labels_T, _ = inputs()
    teacher_head, teacher_TH = nn.Linear(8, V), torch.randn(T, 8)
    sizes = []
    teacher_head.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    chunked = Divergence(teacher_TH, teacher_head)
    found = compute(chunked, nn.Identity(), logits_TV, labels_T, max_logits=10 * V)
    found.sum().backward()
    assert max(sizes) <= 10
    assert teacher_head.weight.grad is None
    whole = Divergence(teacher_head(teacher_TH))
    expected = compute(whole, nn.Identity(), logits_TV, labels_T)
    torch.testing.assert_close(found, expected, rtol=0, atol=divergence_tolerance(V, 30.0))


def test_a_word_that_the_teacher_excludes_adds_nothing() -> None:
    logits_TV, labels_T, teacher_TV = inputs()
    excluded_TV = teacher_TV.masked_fill(torch.arange(V) < 4, -torch.inf)
    found = compute(Divergence(excluded_TV), nn.Identity(), logits_TV, labels_T)
    target_TV = torch.softmax(excluded_TV.double(), -1)
    truth_T = F.kl_div(torch.log_softmax(logits_TV.double(), -1), target_TV, reduction="none").sum(1)
    truth_T = truth_T.masked_fill(labels_T == -100, 0.0)
    assert (found - truth_T).abs().max() < divergence_tolerance(V, 25.0)
    assert torch.autograd.grad(found.sum(), logits_TV)[0].isfinite().all()


@pytest.mark.parametrize(
    ("reverse", "temperature"), [(0.0, 1.0), (0.0, 4.0), (0.4, 2.0), (1.0, 1.0)], ids=str
)
def test_the_top_k_of_all_words_is_the_divergence_over_all_words(reverse: float, temperature: float) -> None:
    logits_TV, labels_T, teacher_TV = inputs()
    full = Divergence(teacher_TV, reverse=reverse, temperature=temperature)
    log_p_Tk, words_Tk, log_r_T = top_k_and_rest(teacher_TV, V, temperature)
    assert (log_r_T == -torch.inf).all()
    top = TopKDivergence(log_p_Tk, words_Tk.int(), log_r_T, reverse=reverse, temperature=temperature)
    found = []
    for objective in (full, top):
        values_T = compute(objective, nn.Identity(), logits_TV, labels_T)
        found.append((values_T.detach(), torch.autograd.grad(values_T.sum(), logits_TV)[0]))
    spread = 25.0 / temperature
    assert (found[0][0] - found[1][0]).abs().max() < 2 * divergence_tolerance(V, spread)
    assert (found[0][1] - found[1][1]).abs().max() < 4 * log_p_tolerance(V, spread)


def test_a_small_rest_of_the_teacher_keeps_its_digits() -> None:
    # r = e**-30: 1 - (sum of p) is 0 or 6e-8, and the reverse divergence needs log r.
    log_p_Tk = torch.full((1, K), -math.log(K))
    logits_TV = torch.zeros(1, V, requires_grad=True)
    target = (log_p_Tk, torch.arange(K)[None], torch.tensor([-30.0]))
    found = compute(
        TopKDivergence(*target, reverse=1.0), nn.Identity(), logits_TV, torch.zeros(1, dtype=torch.int64)
    )
    s = (V - K) / V
    expected = (K / V) * math.log(K / V / (1 / K) / K) + s * (math.log(s) + 30.0)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_top_k_of_a_sure_student_has_a_rest_that_is_not_rounded_away() -> None:
    logits_TV = torch.zeros(2, V)
    logits_TV[:, :K] = torch.tensor([40.0, 200.0])[:, None]  # the rest has e**-38 and e**-198 of the mass
    logits_TV.requires_grad_()
    log_p_Tk = torch.full((2, K), math.log(0.9 / K))
    words_Tk = torch.arange(K).expand(2, K)
    labels_T = torch.zeros(2, dtype=torch.int64)
    found_T = compute(TopKDivergence(log_p_Tk, words_Tk), nn.Identity(), logits_TV, labels_T)
    truth_T = top_k_truth(logits_TV, log_p_Tk, words_Tk)
    assert (found_T - truth_T).abs().max() < divergence_tolerance(V, 200.0)
    (gradient_TV,) = torch.autograd.grad(found_T.sum(), logits_TV)
    (truth_TV,) = torch.autograd.grad(truth_T.sum(), logits_TV)
    assert (gradient_TV - truth_TV).abs().max() < 2 * log_p_tolerance(V, 200.0)
    # Each of the other words is to gain 0.1 / 36, which 1 - (sum of q) would not have said.
    torch.testing.assert_close(gradient_TV[:, K:], torch.full((2, V - K), -0.1 / (V - K)), rtol=1e-4, atol=0)


def test_a_gradient_that_blocks_would_lose_is_an_error() -> None:
    raw_tv = torch.randn(4, 8, requires_grad=True)
    logits = Logits(raw_tv, lambda x: x, Words(8))
    mean_t = logits.for_each_token(lambda x_tv: x_tv.mean(1))
    with pytest.raises(ValueError, match="differentiable in the logits alone; detach"):
        logits.for_each_token(lambda x_tv, mean_t: x_tv.sum(1) - mean_t, mean_t)
    cubes = logits.for_each_token(lambda x_tv: (x_tv**3).sum(1)).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cubes, raw_tv, create_graph=True)


def documented_objective() -> models.Objective:
    """The objective that docs/models.md shows: log(Z)**2."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(class SquaredNormalizer:.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/models.md", "exec"), scope)
    found: models.Objective = scope["SquaredNormalizer"]()
    return found


def test_a_decoder_takes_any_objective_and_returns_a_number_or_one_for_each_token() -> None:
    ours, _ = twins(CHECKPOINTS["gemma2-tiny"])
    tokens_BS = random_tokens(2, 24)
    labels_BS = random_labels(tokens_BS)
    logits_BSV = ours(tokens_BS)
    teacher_BSV = torch.randn_like(logits_BSV)
    flat = truths(*(each.flatten(0, 1) for each in (logits_BSV, labels_BS, teacher_BSV)))
    for name, objective in objectives(teacher_BSV).items():
        found = ours(tokens_BS, None, labels_BS, loss=objective)
        truth = flat[name].sum() if CASES[name].is_sum else flat[name].view(2, 24)
        torch.testing.assert_close(found, truth.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(
        ours(tokens_BS, None, labels_BS), ours(tokens_BS, None, labels_BS, summed_cross_entropy)
    )
    found = ours(tokens_BS, None, labels_BS, loss=documented_objective())
    expected = logits_BSV.logsumexp(-1).square()[labels_BS != -100].sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_an_objective_with_two_numbers_for_each_token_is_one_line() -> None:
    class TwoNumbers(type(models.log_probabilities)):  # type: ignore[misc]
        def values(self, logits: Logits, labels_t: torch.Tensor) -> torch.Tensor:
            return logits.for_each_token(lambda x_tv: x_tv[:, :2])

    ours, _ = twins(CHECKPOINTS["gemma2-tiny"])
    tokens_BS = random_tokens(2, 24)
    with pytest.raises(UserError, match=r"TwoNumbers.values: .* each of 48 tokens, .* shape \[48, 2\]"):
        ours(tokens_BS, None, tokens_BS, loss=TwoNumbers())


# Two chunks: the peak of one, and what the first leaves.
@pytest.mark.parametrize(
    ("num_chunks", "name"),
    slow_but(
        lambda num_chunks, name: num_chunks == 2 or name in ("cross-entropy", "divergence"),
        itertools.product([1, 2], OBJECTIVES),
    ),
)
def test_a_chunk_holds_two_copies_of_its_logits_and_a_block_of_temporaries(
    num_chunks: int, name: str
) -> None:
    dtype = torch.bfloat16
    vocab_size, chunk_tokens, hidden_size, block_rows = 128_256, 32, 4, 9  # 2**20 / 128,256 rounded up
    head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype)
    num_tokens = num_chunks * chunk_tokens
    hidden_TH = torch.randn(num_tokens, hidden_size, dtype=dtype, requires_grad=True)
    labels_T = torch.randint(0, vocab_size, (num_tokens,))
    teacher_TH = torch.randn(num_tokens, hidden_size, dtype=dtype)
    case = CASES[name]
    has_teacher = case.num_copies > 2
    objective = case.make(teacher_TH, head) if has_teacher else objectives(torch.zeros(num_tokens, V))[name]
    with MemoryLog() as log:
        max_logits = chunk_tokens * vocab_size
        compute(
            objective, head, hidden_TH, labels_T, vocab_size, softcap=30.0, max_logits=max_logits
        ).sum().backward()
    peak = max(found.total() for found in log.peaks().values())
    copy_bytes = chunk_tokens * vocab_size * dtype.itemsize
    weight_bytes = vocab_size * hidden_size * dtype.itemsize
    gradient_bytes = num_chunks * weight_bytes  # of the head, which has no optimizer
    if case.is_sum and num_chunks > 1:  # the gradient of one chunk, and a float32 sum (one_pass.py)
        gradient_bytes = weight_bytes + vocab_size * hidden_size * 4
    block_bytes = block_rows * vocab_size * 4
    assert peak > copy_bytes + gradient_bytes
    assert peak < case.num_copies * copy_bytes + gradient_bytes + case.num_temporaries * block_bytes + 2**18
