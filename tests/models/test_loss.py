"""The chunked loss is the ordinary one, in value and gradient, and never makes all logits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lptune.models import chunked_cross_entropy
from lptune.models.loss import max_logits_per_chunk
from lptune.planned import planned_for
from tests.models.oracle import CHECKPOINTS, random_labels, random_tokens, twins


@pytest.mark.parametrize("max_logits", [1, 40 * 7, 40 * 13, 40 * 37, 10**9])
def test_chunked_loss_equals_cross_entropy_in_value_and_gradients(max_logits: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 40)
    hidden_TH = torch.randn(37, 16, requires_grad=True)
    labels_T = torch.randint(0, 40, (37,)).masked_fill(torch.rand(37) < 0.3, -100)
    chunk_sizes = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        chunk_sizes.append(hidden.shape[0])
        return head(hidden)

    inputs = [hidden_TH, head.weight, head.bias]
    expected = F.cross_entropy(head(hidden_TH), labels_T, ignore_index=-100, reduction="sum")
    expected_grads = torch.autograd.grad(expected, inputs)
    loss = chunked_cross_entropy(hidden_TH, labels_T, logits_of, 40, max_logits=max_logits)
    assert sum(chunk_sizes) == 37
    assert max(chunk_sizes) <= max(1, max_logits // 40)
    # float32 sums of 37 terms in another order
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, expected_grad in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_larger_chunks_can_be_tried_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert max_logits_per_chunk(cpu) == max_logits_per_chunk(cuda) == 2**27
    monkeypatch.setenv("LPTUNE_TRY", "large_loss_chunks")
    assert (max_logits_per_chunk(cpu), max_logits_per_chunk(cuda)) == (2**27, 2**29)
    monkeypatch.setattr("lptune.models.loss.MAX_LOGITS_PER_CHUNK", 40 * 3)
    calls: list[int] = []

    def logits_of(hidden_tH: torch.Tensor) -> torch.Tensor:
        calls.append(hidden_tH.shape[0])
        return hidden_tH.repeat(1, 10)

    hidden_TH, labels_T = torch.randn(24, 4), torch.arange(24)
    expected = F.cross_entropy(hidden_TH.repeat(1, 10), labels_T, reduction="sum")
    for device_type, sizes in (("cpu", [3] * 8), ("cuda", [12, 12])):
        calls.clear()
        with planned_for(device_type):
            loss = chunked_cross_entropy(hidden_TH, labels_T, logits_of, 40)
        assert calls == sizes
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_labels_of_minus_100_alone_give_zero_loss_and_zero_gradients() -> None:
    hidden_TH = torch.randn(8, 16, requires_grad=True)
    labels_T = torch.full((8,), -100)
    loss = chunked_cross_entropy(hidden_TH, labels_T, nn.Linear(16, 40), 40, max_logits=80)
    assert loss == 0
    assert not torch.autograd.grad(loss, hidden_TH)[0].any()


def test_loss_is_float32_from_bf16_hidden_states() -> None:
    head = nn.Linear(16, 40, dtype=torch.bfloat16)
    hidden_TH = torch.randn(8, 16, dtype=torch.bfloat16)
    loss = chunked_cross_entropy(hidden_TH, torch.arange(8), head, 40)
    assert loss.dtype is torch.float32
    expected = F.cross_entropy(head(hidden_TH).float(), torch.arange(8), reduction="sum")
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("name", ["llama3_2-tiny", "gemma2-tiny", "granite3-tiny"])
def test_decoder_loss_in_chunks_equals_decoder_loss_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = twins(CHECKPOINTS[name])
    tokens_BS = random_tokens(2, 24)
    labels_BS = random_labels(tokens_BS)
    at_once = ours(tokens_BS, None, labels_BS)
    grads_at_once = torch.autograd.grad(at_once, list(ours.parameters()))

    calls = []
    ours.lm_head.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    in_tens = functools.partial(chunked_cross_entropy, max_logits=256 * 10)
    monkeypatch.setattr("lptune.models.decoder.chunked_cross_entropy", in_tens)
    in_chunks = ours(tokens_BS, None, labels_BS)
    assert len(calls) == 5  # 48 tokens, at most 10 at a time, through the head module itself
    torch.testing.assert_close(in_chunks, at_once, rtol=1e-6, atol=0)
    grads_in_chunks = torch.autograd.grad(in_chunks, list(ours.parameters()))
    for grad, expected in zip(grads_in_chunks, grads_at_once, strict=True):
        assert (grad - expected).norm() <= 1e-5 * expected.norm()
