"""The decoder under what the library does to it: meta device, tying, casting and compiling."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lptune.models import PRESETS, build_on_meta, config_from_dict
from tests.helpers.models_oracle import CHECKPOINTS, packed, random_labels, random_tokens, twins
from tests.helpers.slow import slow_but

# Dynamo looks at .grad of what it is given, and hides the warning too late for warnings that are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LENGTHS = [[20, 5, 23], [1, 47]]
SEQ_LEN = 48


@pytest.mark.parametrize("family", PRESETS)
def test_meta_build_then_to_empty_then_init_is_a_working_model(family: str) -> None:
    config = config_from_dict(PRESETS[family]["tiny"])
    model = build_on_meta(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tied
    model.to_empty(device="cpu")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tied
    model.reset_buffers("cpu")
    model.init_weights(seed=0)
    loss = model(random_tokens(2, 32), None, random_labels(random_tokens(2, 32)))
    assert loss.isfinite()
    assert loss.dtype is torch.float32


@pytest.mark.parametrize("num_targets", [0, 7, 64])
def test_the_summed_loss_runs_the_head_for_targets_alone(num_targets: int) -> None:
    model = build_on_meta(config_from_dict(PRESETS["gemma3"]["tiny"]))
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    model.init_weights(seed=0)
    tokens_BS = random_tokens(2, 32)
    labels_BS = random_labels(tokens_BS)
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(0))[: 64 - num_targets]
    labels_BS.view(-1)[chosen] = -100
    rows = list[int]()
    model.lm_head.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    assert torch.allclose(model.summed_loss(tokens_BS, None, labels_BS), model(tokens_BS, None, labels_BS))
    assert rows == [int((labels_BS != -100).sum()), 64]


def test_initial_weights_are_a_function_of_seed_and_name_alone() -> None:
    small, large = (
        build_on_meta(config_from_dict(PRESETS["gemma2"]["tiny"] | {"num_hidden_layers": n})) for n in (2, 4)
    )
    for model, seed in ((small, 3), (large, 3)):
        model.to_empty(device="cpu")
        model.init_weights(seed)
    weights = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(weights[name], small.initial_value(name, seed=4))
    assert not torch.equal(weights[name], weights["model.layers.0.mlp.up_proj.weight"])
    n = weights[name].numel()
    assert abs(weights[name].std() - 0.02) < 4 * 0.02 / (2 * n) ** 0.5
    assert not weights["model.norm.weight"].any()  # Gemma's identity; elsewhere it is one


def test_masked_tail_document_gets_gradients_of_exactly_zero() -> None:
    ours, _ = twins(CHECKPOINTS["llama3_2-tiny"])
    tokens_BS = random_tokens(1, SEQ_LEN)
    labels_BS = tokens_BS.roll(-1).clone()
    labels_BS[0, 40:] = -100
    hidden = []

    def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        hidden.append(out)

    for block in ours.model.layers:
        block.register_forward_hook(keep)
    ours(tokens_BS, packed([[25, 15, 8]]), labels_BS).backward()
    for out in hidden:
        assert out.grad is not None
        assert not out.grad[0, 40:].any()
        assert out.grad[0, :40].any()


def test_bf16_parameters_give_bf16_logits_close_to_float32() -> None:
    for name in ("llama3_2-tiny", "gemma2-tiny", "olmo2-tiny", "granite3-tiny"):
        ours, theirs = twins(CHECKPOINTS[name])
        tokens_BS = random_tokens(2, SEQ_LEN)
        exact = ours(tokens_BS)
        low = ours.bfloat16()(tokens_BS)
        assert low.dtype is torch.bfloat16
        ours_error = (low - exact).norm()
        theirs_error = (theirs.bfloat16()(tokens_BS).logits - exact).norm()
        assert ours_error <= 1.25 * theirs_error  # we round less often, never more


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Kinds of layers that differ in what they compute: a window alone is another mask, so it is not one.
NUM_GRAPHS = {"llama3_2": 1, "gemma3": 1, "phi4": 1, "smollm3": 2}


# llama3_2: distributed/test_parallelize.py; phi4: below.
@pytest.mark.parametrize("family", slow_but(lambda family: family in ("gemma3", "smollm3"), NUM_GRAPHS))
def test_one_graph_serves_all_blocks_of_a_kind(family: str, fresh_dynamo: None) -> None:
    ours, _ = twins(PRESETS[family]["tiny"] | {"num_hidden_layers": 4})
    tokens_BS, documents = random_tokens(2, SEQ_LEN), packed(LENGTHS)
    labels_BS = random_labels(tokens_BS)
    expected = ours(tokens_BS, documents, labels_BS)
    expected_grads = torch.autograd.grad(expected, list(ours.parameters()))

    counter = CompileCounterWithBackend("aot_eager")
    for block in ours.model.layers:
        block.compile(fullgraph=True, backend=counter)
    for _ in range(2):  # the second forward compiles nothing
        loss = ours(tokens_BS, documents, labels_BS)
        grads = torch.autograd.grad(loss, list(ours.parameters()))
    assert counter.frame_count == NUM_GRAPHS[family]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, truth in zip(grads, expected_grads, strict=True):
        assert (grad - truth).norm() <= 1e-5 * truth.norm()


def test_other_documents_of_the_same_shape_do_not_recompile(fresh_dynamo: None) -> None:
    ours, _ = twins(CHECKPOINTS["phi4-tiny"])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)  # the whole model, longrope included
    for lengths in ([[20, 5, 23], [1, 47]], [[48], [16, 32]]):
        tokens_BS = random_tokens(2, SEQ_LEN)
        documents = packed(lengths)._replace(offsets=torch.zeros(8, dtype=torch.int32))
        labels_BS = random_labels(tokens_BS)
        loss = compiled(tokens_BS, documents, labels_BS)
        torch.testing.assert_close(loss, ours(tokens_BS, documents, labels_BS), rtol=1e-5, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["llama3_2-tiny", "gemma3-tiny", "mistral-tiny"])
def test_rows_of_one_document_need_no_boundaries(name: str) -> None:
    """Padding after the document then sees it. It has no targets, so losses and gradients stay the same."""
    ours, _ = twins(CHECKPOINTS[name])
    lengths = [[48], [31, 17], [40, 8]]  # the second of each is padding
    tokens_BS = random_tokens(len(lengths), 48)
    labels_BS = random_labels(tokens_BS)
    for row, (length, *_) in enumerate(lengths):
        labels_BS[row, length - 1 :] = -100
    results = []
    for documents in (packed(lengths), None):
        loss = ours(tokens_BS, documents, labels_BS)
        results.append([loss, *torch.autograd.grad(loss, list(ours.parameters()))])
    for bounded, plain in zip(*results, strict=True):
        # Another attention kernel: a few float32 ulps.
        assert (plain - bounded).norm() <= 1e-5 * bounded.norm()
