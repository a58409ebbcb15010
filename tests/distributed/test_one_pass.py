"""Gradients that come with a decoder's loss are those of recomputed chunks, on any mesh and in 8 bits."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lptune import distributed, linear, models
from lptune.distributed.compilation import compile_chunk_loss
from lptune.models import chunks
from tests.distributed.test_tensor_parallel import _build, _config, _decoder_config
from tests.helpers.ranks import Ranks

VOCABULARY, ROWS, TOKENS = 160, 2, 18
HEADS = ("lm_head.weight", "model.embed_tokens.weight")


def _gradients(world: distributed.World, model: Any, *, in_one_pass: bool) -> dict[str, Tensor]:
    """Loss and gradients of two micro-batches of each data rank, with chunks of 10 tokens."""
    size = (2, world.data_size, ROWS, TOKENS + 1)
    tokens = torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(0))
    weight, total = 1 / tokens.numel(), torch.zeros(())
    stands = {} if in_one_pass else {"_computes_gradients": lambda *_: False}
    with mock.patch.multiple(chunks, MAX_LOGITS_PER_CHUNK=10 * model.words_here, **stands):
        for number, batch in enumerate(tokens[:, world.data_rank]):
            distributed.sync_gradients(model, number == 1)
            labels_BS = batch[:, 1:].clone()
            labels_BS[0, :3] = -100
            loss = model(batch[:, :-1], None, labels_BS, expected_gradient=weight)
            (loss * weight).backward()
            total += loss.detach()
    results = {"loss": total}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = distributed.full_tensor(parameter.grad).clone()
    model.zero_grad(set_to_none=True)
    return results


def _both(rank: int, num_ranks: int, preset: str, kind: str, tensor: int, compiled: bool) -> Any:
    """The results of one pass and how often it called the head; the same of recomputed chunks."""
    cfg = _config(kind, tensor=tensor)
    cfg = dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, skip=()))
    results, calls = list[Any](), list[int]()
    with distributed.session("cpu", cfg.parallel) as world:
        for in_one_pass in (True, False):
            model = _build(world, cfg, _decoder_config(preset, vocab_size=VOCABULARY))
            model.words_here = VOCABULARY // tensor
            if compiled:
                compile_chunk_loss(model.chunk_loss)
            inner = model.chunk_loss.forward
            model.chunk_loss.forward = lambda *args, inner=inner: calls.append(1) or inner(*args)
            with model.scaling.step():
                results.append(_gradients(world, model, in_one_pass=in_one_pass))
            results.append(len(calls))
            calls.clear()
    return results


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.mark.parametrize(
    ("preset", "kind", "tensor", "compiled"),
    [
        ("llama3_2", "none", 1, False),  # tied
        ("llama3_1", "int8_rowcol", 1, False),  # a head in 8 bits
        ("gemma2", "none", 2, False),  # tied, a soft cap, cut by words
        ("llama3_1", "int8_rowcol", 2, False),
        ("llama3_1", "float8_delayed", 1, False),
        ("llama3_2", "none", 2, True),
    ],
)
def test_gradients_are_those_of_recomputed_chunks(
    ranks: Ranks, preset: str, kind: str, tensor: int, compiled: bool
) -> None:
    for found, calls, expected, recomputed_calls in ranks.run(_both, 2, preset, kind, tensor, compiled):
        assert calls == 2 * 4  # two micro-batches of four chunks
        assert recomputed_calls == 2 * calls
        assert torch.equal(found["loss"], expected["loss"])
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if name in HEADS:
                # Sums of four float32 chunks, in another order.
                assert (value - expected[name]).norm() <= 4 * 2**-24 * 4 * expected[name].norm(), name
            else:
                assert torch.equal(value, expected[name]), name


def test_a_head_in_8_bits_runs_each_gemm_once_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build_on_meta(_decoder_config("llama3_1", vocab_size=VOCABULARY)).to_empty(device="cpu")
    model.reset_buffers()
    model.init_weights(0)
    cfg = _config("int8_rowcol").precision
    plan = linear.convert(model, dataclasses.replace(cfg, skip=()))
    head = next(layer for layer in plan.layers if layer.name == "lm_head")
    assert head.spec is not None
    monkeypatch.setattr(chunks, "MAX_LOGITS_PER_CHUNK", 10 * VOCABULARY)
    tokens_BS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    with linear.verify_step(model, plan, 1) as verified:
        model(tokens_BS, None, tokens_BS).backward()
    assert verified.num_recomputed == 0
    assert verified.num_gemms == 3 * (len(plan.converted) - 1 + 4)
