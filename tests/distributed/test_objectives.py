"""Objectives of a head that is cut by words are those of a whole head, in value and gradient, and gradients
that come with the loss are those of recomputed chunks.

Tolerances are those of tests/models/test_loss.py, derived there for sums in any order, against float64.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lptune import distributed, linear, models
from lptune.config import ParallelConfig
from lptune.distributed import record_collectives
from lptune.distributed.activation_collectives import RankWords
from lptune.distributed.compilation import compile_chunk_loss
from lptune.models import Group, TopKDivergence, WeightedSum, chunks
from lptune.models.chunks import Logits, in_chunks
from lptune.models.loss import is_number
from tests.distributed.test_tensor_parallel import _config, build, preset_config
from tests.helpers.ranks import Ranks
from tests.models import test_loss as one_rank

V, T = one_rank.V, one_rank.T
NUM_RANKS = 2
IS_SUM = {name for name, case in one_rank.CASES.items() if case.is_sum}


class _PartOfTheLogits(nn.Module):
    """A head that returns the logits of this rank's words."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.words = RankWords(V, group)

    def forward(self, logits_TV: Tensor) -> Tensor:
        return logits_TV[:, self.words.first : self.words.first + self.words.width]


def _cases(num_tokens: int = T) -> dict[str, models.Objective]:
    _, _, teacher_TV = one_rank.inputs()
    teacher_TV = teacher_TV[:num_tokens]
    # With so many words each rank can have all of its own among the top k.
    many = TopKDivergence(*one_rank.top_k(teacher_TV, V - 3))
    return one_rank.objectives(teacher_TV) | {"top all but three": many}


def _objectives_of_parts(rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Values, the whole gradients, and the numbers of all-reduces in forward and backward of each case."""
    results = dict[str, Tensor]()
    with distributed.session("cpu", ParallelConfig(tensor=num_ranks)) as world:
        assert world.tensor_mesh is not None
        head = _PartOfTheLogits(Group.of(world.tensor_mesh.get_group()))
        for num_tokens, max_logits in ((T, None), (T, 5 * V), (0, None)):
            for name, objective in _cases(num_tokens).items():
                logits_TV, labels_T, _ = one_rank.inputs()
                leaf_TV = logits_TV.detach()[:num_tokens].requires_grad_()
                of_chunk = functools.partial(one_rank.chunk_loss(V), head, objective)
                tensors = [leaf_TV, labels_T[:num_tokens], *objective.targets]
                with record_collectives() as forward:
                    parameters = () if is_number(objective) else None  # the head has none
                    found = in_chunks(of_chunk, tensors, V, max_logits=max_logits, parameters=parameters)
                with record_collectives() as backward:
                    (gradient_TV,) = torch.autograd.grad(found.sum(), leaf_TV)
                # The gradient of another rank's words is zero here.
                torch.distributed.all_reduce(gradient_TV)
                key = f"{name}, {num_tokens} tokens, {max_logits}"
                results[key], results[f"{key}: gradient"] = found.detach(), gradient_TV
                results[f"{key}: all-reduces"] = torch.tensor(
                    [each.num_calls(operation="all_reduce") for each in (forward, backward)]
                )
    return results


@pytest.fixture(scope="module")
def of_parts(ranks: Ranks) -> list[dict[str, Tensor]]:
    return ranks.run(_objectives_of_parts, NUM_RANKS)


def test_objectives_of_parts_are_those_of_the_whole_in_value_and_gradient(
    of_parts: list[dict[str, Tensor]],
) -> None:
    logits_TV, labels_T, teacher_TV = one_rank.inputs()
    truths = one_rank.truths(logits_TV, labels_T, teacher_TV)
    many_T = one_rank.top_k_truth(logits_TV, *one_rank.top_k(teacher_TV, V - 3))
    truths["top all but three"] = many_T.masked_fill(labels_T == -100, 0.0)
    both = torch.stack([logits_TV.detach(), teacher_TV])
    spread = float((both.amax(-1) - both.amin(-1)).max())
    log_p = one_rank.log_p_tolerance(V, spread)
    for results in of_parts:
        for name, truth_T in truths.items():
            for max_logits in (None, 5 * V):
                key = f"{name}, {T} tokens, {max_logits}"
                found, truth = results[key], truth_T.detach()
                case = one_rank.CASES["top k" if name.startswith("top") else name]
                tolerance = case.tolerance(V, spread)
                if name.startswith("top"):
                    # 1 - (sum of p) is off by u for each of up to V words, times the log of a probability.
                    tolerance += V * 2**-24 * spread
                if case.is_sum:
                    truth = truth.sum()
                    tolerance = T * log_p + T * 2**-24 * float(truth)
                assert (found - truth).abs().max() < tolerance, key
                (truth_TV,) = torch.autograd.grad(truth_T.sum(), logits_TV, retain_graph=True)
                gradient_TV = results[f"{key}: gradient"]
                assert (gradient_TV - truth_TV).abs().max() < 2 * log_p + V * 2**-24, key
                assert not gradient_TV[labels_T == -100].any(), key


def test_every_rank_has_the_same_bits(of_parts: list[dict[str, Tensor]]) -> None:
    first, *others = of_parts
    for results in others:
        for key, value in first.items():
            assert torch.equal(results[key], value), key


def test_no_token_is_zero_with_a_gradient_of_no_row(of_parts: list[dict[str, Tensor]]) -> None:
    for name in _cases():
        found = of_parts[0][f"{name}, 0 tokens, None"]
        assert found.shape == (() if name in IS_SUM else (0,))
        assert not found.any()
        assert of_parts[0][f"{name}, 0 tokens, None: gradient"].shape == (0, V)


def test_a_chunk_takes_two_all_reduces_in_forward_and_backward_alone_takes_none(
    of_parts: list[dict[str, Tensor]],
) -> None:
    for name, objective in _cases().items():
        times = len(objective.objectives) if isinstance(objective, WeightedSum) else 1
        assert of_parts[0][f"{name}, {T} tokens, None: all-reduces"].tolist() == [2 * times, 0], name
        # 8 chunks of five tokens; backward computes their forward again, unless the result is a number.
        found = of_parts[0][f"{name}, {T} tokens, {5 * V}: all-reduces"].tolist()
        assert found == [16 * times, 0 if name in IS_SUM else 16 * times], name


def _decoder_objectives(rank: int, num_ranks: int, compiled: bool = False) -> dict[str, Tensor]:
    """Every objective of a whole decoder with a soft cap, and the gradient of its first norm.

    compiled: the head and two of the objectives are, the blocks are not.
    """
    cfg = _config(tensor=num_ranks)
    results = dict[str, Tensor]()
    with distributed.session("cpu", cfg.parallel) as world:
        model = build(world, cfg, preset_config("gemma2", vocab_size=131))
        if compiled:
            compile_chunk_loss(model.chunk_loss)
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(0, 131, (2, 17), generator=generator)
        teacher_BSV = torch.randn(2, 16, 131, generator=generator) * 3
        labels_BS = tokens_BS[:, 1:].clone()
        labels_BS[0, :3] = -100
        for name, objective in one_rank.objectives(teacher_BSV).items():
            if compiled and name not in ("cross-entropy", "top k"):
                continue
            distributed.sync_gradients(model, True)
            found = model(tokens_BS[:, :-1], None, labels_BS, loss=objective)
            found.sum().backward()
            weight = model.model.layers[0].input_layernorm.weight
            results[name] = found.detach()
            results[f"{name}: gradient"] = distributed.full_tensor(weight.grad)
            model.zero_grad(set_to_none=True)
    return results


@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_a_decoder_over_two_ranks_has_the_objectives_of_one(ranks: Ranks, compiled: bool) -> None:
    cut = ranks.run(_decoder_objectives, NUM_RANKS, compiled)
    expected = _decoder_objectives(0, 1)
    for results in cut:
        assert len(results) == (4 if compiled else 2 * len(one_rank.CASES))
        for key in results:
            value = expected[key]
            # Sums of up to 256 float32 terms in another order, as in test_tensor_parallel.py.
            assert (results[key] - value).norm() <= 1e-5 * value.norm(), key


def _documented(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The value of the documented objective and its whole gradient."""
    with distributed.session("cpu", ParallelConfig(tensor=num_ranks)) as world:
        assert world.tensor_mesh is not None
        head = _PartOfTheLogits(Group.of(world.tensor_mesh.get_group()))
        logits_TV, labels_T, _ = one_rank.inputs()
        of_chunk = functools.partial(one_rank.chunk_loss(V), head, one_rank.documented_objective())
        found = in_chunks(of_chunk, [logits_TV, labels_T], V, max_logits=5 * V)
        (gradient_TV,) = torch.autograd.grad(found, logits_TV)
        torch.distributed.all_reduce(gradient_TV)
        return found.detach(), gradient_TV


def test_the_documented_objective_is_that_of_all_words(ranks: Ranks) -> None:
    logits_TV, labels_T, _ = one_rank.inputs()
    truth = logits_TV.double().logsumexp(1)[labels_T != -100].square().sum()
    (truth_TV,) = torch.autograd.grad(truth, logits_TV)
    for found, gradient_TV in ranks.run(_documented, NUM_RANKS):
        # Relative: log Z as a log-probability, squared, and a sum of T terms.
        rtol = (2 * one_rank.log_p_tolerance(V, 30.0) + T * 2**-24) * 2
        torch.testing.assert_close(found.double(), truth.detach(), rtol=rtol, atol=0)
        torch.testing.assert_close(gradient_TV, truth_TV, rtol=rtol, atol=1e-6)


class _Whole:
    """log(Z)**2 of a whole vocabulary."""

    targets: tuple[Tensor, ...] = ()

    def values(self, logits: Logits, labels_t: Tensor) -> Tensor:
        return logits.for_each_token(lambda x_tV: x_tV.logsumexp(1).square())

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t.sum()


class _Overwritten(type(one_rank.documented_objective())):
    """Its `values` are those of a whole vocabulary again."""

    def values(self, logits: Logits, labels_t: Tensor) -> Tensor:
        return _Whole.values(self, logits, labels_t)


def _own_objectives(rank: int, num_ranks: int) -> list[str]:
    """The value of each objective, or why it is refused."""
    cfg = _config(tensor=num_ranks)
    found = list[str]()
    with distributed.session("cpu", cfg.parallel) as world:
        model = build(world, cfg, preset_config("llama3_2", vocab_size=131))
        tokens_BS = torch.randint(0, 131, (2, 17), generator=torch.Generator().manual_seed(0))
        for objective in (_Whole(), _Overwritten(), one_rank.documented_objective()):
            try:
                value = model(tokens_BS[:, :-1], None, tokens_BS[:, 1:], loss=objective)
                found.append(f"{value.item():.3f}")
            except ValueError as error:
                found.append(str(error))
    return found


def test_an_objective_of_a_whole_vocabulary_is_refused_where_that_is_cut(ranks: Ranks) -> None:
    whole, overwritten, documented = _own_objectives(0, 1)
    assert whole == overwritten == documented
    for refused, also, found in ranks.run(_own_objectives, NUM_RANKS):
        assert refused.startswith("_Whole would see a part of the vocabulary")
        assert refused.endswith("or train with parallel.tensor=1")
        assert also.startswith("_Overwritten would see a part")
        assert float(found) == pytest.approx(float(documented), rel=1e-4)


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
            model = build(world, cfg, preset_config(preset, vocab_size=VOCABULARY))
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
    model = models.build_on_meta(preset_config("llama3_1", vocab_size=VOCABULARY)).to_empty(device="cpu")
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
