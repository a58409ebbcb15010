"""The k most probable words and their rest, against float64 over all words."""

import pytest
import torch
from torch import Tensor

from lptune import models
from lptune.distillation.top_k import TEMPERATURES, at_temperature, fewer, top_k
from tests.helpers.models_oracle import CHECKPOINTS, twins

T, K = 24, 16
TOLERANCE = 1e-5
"""Float32 logits of up to 20 in size: a log-probability is off by about 20 * 2**-24 + V * 2**-24."""


def decoder() -> models.Decoder:
    ours, _ = twins(CHECKPOINTS["gemma2-tiny"])  # has a soft-cap
    return ours


def truth(teacher: models.Decoder, hidden_TH: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of all words, float64."""
    return torch.log_softmax(teacher.logits_of(hidden_TH).double() / temperature, -1)


@pytest.mark.parametrize("k", [1, K, "all"])
@pytest.mark.parametrize("temperature", [*TEMPERATURES, 2.5])
def test_words_and_rest_are_those_of_the_softmax_over_all_words(k: int | str, temperature: float) -> None:
    teacher = decoder()
    hidden_TH = 3 * torch.randn(T, teacher.config.hidden_size, generator=torch.Generator().manual_seed(0))
    num_words = teacher.config.vocab_size if k == "all" else int(k)
    with torch.no_grad():
        found = top_k(teacher, hidden_TH, num_words, (temperature,), torch.float32)
        log_p_TV = truth(teacher, hidden_TH, temperature)
    assert found.words_Tk.dtype == torch.int32
    log_p_Tk, log_rest_T = at_temperature(found.log_p_Tk, found.log_rest_TM[:, 0], temperature)
    words_Tk = found.words_Tk.long()
    assert (log_p_Tk - log_p_TV.gather(1, words_Tk)).abs().max() < TOLERANCE
    assert torch.equal(log_p_Tk, log_p_Tk.sort(1, descending=True).values)
    rest_T = log_p_TV.scatter(1, words_Tk, -torch.inf).logsumexp(1)
    if k == "all":
        assert (log_rest_T == -torch.inf).all()
    else:
        assert (log_rest_T - rest_T).abs().max() < TOLERANCE
        assert log_p_TV.gather(1, words_Tk).amin(1).ge(log_p_TV.scatter(1, words_Tk, -99).amax(1)).all()


def test_chunks_of_tokens_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = decoder()
    hidden_TH = torch.randn(T, teacher.config.hidden_size)
    whole = top_k(teacher, hidden_TH, K, TEMPERATURES, torch.float16)
    monkeypatch.setattr(
        "lptune.models.chunks.MAX_LOGITS_PER_CHUNK", 4 * 7 * teacher.config.vocab_size
    )  # chunks of 7 tokens
    parts = top_k(teacher, hidden_TH, K, TEMPERATURES, torch.float16)
    for one, other in zip(whole, parts, strict=True):
        # A GEMM of fewer rows may round otherwise, by an ulp of float32; then by at most one of float16.
        assert torch.allclose(one.float(), other.float(), rtol=2**-10, atol=1e-4)
    none = top_k(teacher, hidden_TH[:0], K, TEMPERATURES, torch.float16)
    assert [len(each) for each in none] == [0, 0, 0]


def test_fewer_words_than_stored_are_those_that_would_have_been_stored() -> None:
    teacher = decoder()
    hidden_TH = torch.randn(T, teacher.config.hidden_size)
    many, few = (top_k(teacher, hidden_TH, k, TEMPERATURES, torch.float32) for k in (K, 5))
    found = fewer(many, 5, TEMPERATURES)
    assert torch.equal(found.words_Tk, few.words_Tk)
    assert torch.equal(found.log_p_Tk, few.log_p_Tk)
    torch.testing.assert_close(found.log_rest_TM, few.log_rest_TM, rtol=1e-5, atol=1e-5)
    assert fewer(many, K, TEMPERATURES) is many
