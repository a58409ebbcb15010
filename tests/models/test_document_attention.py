"""Attention one document at a time: exact, independent of the packing, and one op for compiler and dry run.

tests/models/test_attention.py compares it with the formula in float32, beside the other backends.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lptune.distributed import checkpoint_activations
from lptune.models import attention
from lptune.models.decoder import Decoder
from lptune.models.document_attention import _FLOAT32_BACKWARD_TOKENS, attend_documents
from lptune.plan import memory
from tests.helpers.models_oracle import CHECKPOINTS, packed, random_labels, random_tokens, twins

# Dynamo looks at .grad of what it is given, and hides the warning too late for warnings that are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LENGTHS = [[20, 5, 23], [1, 47]]
SEQ_LEN = 48
SCALE = 0.2


def _tensors(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result of one row: 4 query heads, 2 key heads of 32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num_tokens, num_heads, 32) for num_heads in (4, 2, 2, 4)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def _run(tensors: tuple[Tensor, ...], offsets: list[int], window: int | None) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    q, k, v = (each.clone().requires_grad_() for each in tensors[:3])
    out = attend_documents(q, k, v, torch.tensor(offsets, dtype=torch.int32), SCALE, window)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def _formula(tensors: tuple[Tensor, ...], offsets: list[int], window: int | None) -> list[Tensor]:
    """`_run` in float64, with all scores at once."""
    q, k, v = (each.double().requires_grad_() for each in tensors[:3])
    place, ends = torch.arange(q.shape[1]), torch.tensor(offsets[1:])
    document = torch.bucketize(place, ends, right=True)
    distance = place[:, None] - place
    sees = (document[:, None] == document) & (distance >= 0)
    if window is not None:
        sees &= distance < window
    scores = torch.einsum("bind,bjnd->bnij", q, k.repeat_interleave(2, 2)) * SCALE
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    out = torch.einsum("bnij,bjnd->bind", weights, v.repeat_interleave(2, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


# Documents on both sides of the length from which gradients are computed in bfloat16.
OFFSETS = [0, 1, 33, 33 + _FLOAT32_BACKWARD_TOKENS, 500, 500, 500]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_and_gradients_are_as_exact_as_the_dtype(dtype: torch.dtype, window: int | None) -> None:
    tensors = _tensors(500, dtype)
    epsilon = torch.finfo(dtype).eps
    for ours, truth in zip(_run(tensors, OFFSETS, window), _formula(tensors, OFFSETS, window), strict=True):
        assert ours.dtype is dtype
        # A gradient is rounded at most five times: weights, their gradient, scores' gradient, sum, result.
        # Each rounding is off by eps / 2 at most. float32's products of 32 and sums of 192 add some ulps.
        assert (ours.double() - truth).norm() <= (2.5 if epsilon > 1e-4 else 20) * epsilon * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 40])
def test_a_document_gives_the_same_bits_alone_and_in_any_row(dtype: torch.dtype, window: int | None) -> None:
    tensors = _tensors(500, dtype)
    together = _run(tensors, OFFSETS, window)
    for again, first in zip(_run(tensors, OFFSETS, window), together, strict=True):
        assert torch.equal(again, first)
    for start, stop in pairwise(OFFSETS[:5]):
        alone = _run(tuple(each[:, start:stop] for each in tensors), [0, stop - start], window)
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours, theirs[:, start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    q, k, v, _ = (each.requires_grad_() for each in _tensors(24, dtype))
    for window in (None, 4):
        args = (q, k, v, torch.tensor([0, 10, 24, 24], dtype=torch.int32), SCALE, window)
        torch.library.opcheck(torch.ops.lptune.document_attention.default, args)


@pytest.mark.parametrize("offsets", [[], [0, 20], [4, 24]])
def test_offsets_of_another_number_of_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="must begin with 0 and end with the number of tokens, 24"):
        _run(_tensors(24, torch.float32), offsets, None)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def by_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny float32 rows use the backend, too."""
    monkeypatch.setattr(attention, "_MIN_FLOAT32_ROW", 0)


def _loss_and_gradients(model: Decoder, lengths: list[list[int]] = LENGTHS) -> list[Tensor]:
    tokens_BS = random_tokens(2, SEQ_LEN)
    loss = model(tokens_BS, packed(lengths), random_labels(tokens_BS))
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


# gemma3: two layers have a window of 16 keys, and one has none. phi4: a fused projection.
@pytest.mark.parametrize(("name", "num_graphs"), [("gemma3-tiny", 2), ("phi4-tiny", 1)])
def test_one_graph_of_a_block_serves_all_documents(
    name: str, num_graphs: int, fresh_dynamo: None, by_documents: None
) -> None:
    ours, _ = twins(CHECKPOINTS[name])
    other = [[16, 32], [40, 8]]
    other[0].append(0)  # as many offsets
    expected = [_loss_and_gradients(ours), _loss_and_gradients(ours, other)]
    counter = CompileCounterWithBackend("aot_eager")
    for block in ours.model.layers:
        block.compile(fullgraph=True, backend=counter)
    actual = [_loss_and_gradients(ours), _loss_and_gradients(ours, other)]
    assert counter.frame_count == num_graphs
    for ours_each, truth_each in zip(actual, expected, strict=True):
        for value, truth in zip(ours_each, truth_each, strict=True):
            # The order of a few float32 sums differs.
            assert (value - truth).norm() <= 1e-5 * truth.norm()


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "per_layer"), [("selective", 1), ("full but attention", 1), ("full", 2)])
def test_checkpointing_changes_no_bit_and_selective_repeats_no_attention(
    mode: str, per_layer: int, by_documents: None
) -> None:
    ours, _ = twins(CHECKPOINTS["llama3_2-tiny"])
    expected = _loss_and_gradients(ours)
    checkpoint_activations(ours.model.layers, mode)
    with _Calls() as calls:
        actual = _loss_and_gradients(ours)
    assert calls.names.count("lptune::document_attention") == per_layer * len(ours.model.layers)
    assert calls.names.count("lptune::document_attention_backward") == len(ours.model.layers)
    for value, truth in zip(actual, expected, strict=True):
        assert torch.equal(value, truth)


def test_frozen_layers_and_evaluation_need_no_gradients(by_documents: None) -> None:
    ours, _ = twins(CHECKPOINTS["llama3_2-tiny"])
    expected = _loss_and_gradients(ours)
    names = [name for name, _ in ours.named_parameters()]
    with torch.no_grad():
        tokens_BS = random_tokens(2, SEQ_LEN)
        assert torch.equal(ours(tokens_BS, packed(LENGTHS), random_labels(tokens_BS)), expected[0])
    ours.model.embed_tokens.requires_grad_(False)
    ours.model.layers[0].requires_grad_(False)
    trained = [name for name, parameter in ours.named_parameters() if parameter.requires_grad]
    found = dict(zip(trained, _loss_and_gradients(ours)[1:], strict=True))
    assert found
    for name, grad in found.items():
        assert torch.equal(grad, expected[1 + names.index(name)]), name


def test_a_dry_run_counts_the_bytes_of_a_real_run() -> None:
    taken = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad()):
        with mode, memory.MemoryLog() as log:
            q, k, v = (torch.ones(2, 64, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
            for each in (q, k, v):
                each.requires_grad_()
            offsets = torch.tensor([0, 40, 128], dtype=torch.int32)
            log.phase("forward")
            out = attend_documents(q, k, v, offsets, SCALE, None)
            log.phase("backward")
            out.backward(torch.ones_like(out))
            taken.append(log.peaks())
            del q, k, v, each, out, offsets
    assert taken[0] == taken[1]
    size = 2 * 64 * 16 * 2  # bytes of one head
    assert taken[1]["forward"].total() == (4 + 2 + 2 + 4) * size + 2 * 64 * 4 * 4 + 12
