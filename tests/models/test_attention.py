"""Every attention backend computes the formula, on packed rows, in every kind of layer."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from lptune.hardware.planned import constant_result
from lptune.models import DocumentBounds, attention, config_from_dict
from lptune.models.attention import attend, choose_backend, make_visibility
from tests.helpers.models_oracle import CHECKPOINTS, packed, random_labels, random_tokens, twins

CPU = torch.device("cpu")
LENGTHS = [[20, 5, 23], [1, 47], [48], [16, 16, 16]]
SEQ_LEN = 48
CASES = [(window, packed_rows) for window in (None, 1, 16, 1000) for packed_rows in (False, True)]


def _qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(LENGTHS), SEQ_LEN, num_heads, 16) for num_heads in (4, 2, 2)]
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def _truth(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, is_packed: bool
) -> Tensor:
    """The formula, one query at a time, in float64."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 2), v.double().repeat_interleave(groups, 2)
    rows = []
    for row, lengths in enumerate(LENGTHS if is_packed else [[SEQ_LEN]] * len(LENGTHS)):
        outputs, start = [], 0
        for length in lengths:
            for i in range(start, start + length):
                first = start if window is None else max(start, i - window + 1)
                scores = torch.einsum("nd,snd->ns", q[row, i], k[row, first : i + 1]) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                outputs.append(torch.einsum("ns,snd->nd", scores.softmax(-1), v[row, first : i + 1]))
            start += length
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def _check(backend: str, window: int | None, softcap: float | None, is_packed: bool) -> None:
    qkv = _qkv()
    if not torch.is_grad_enabled():
        qkv = tuple(tensor.detach() for tensor in qkv)
    documents = packed(LENGTHS) if is_packed else None
    visible = make_visibility(backend, documents, len(LENGTHS), SEQ_LEN, window, CPU)
    out = attend(*qkv, visible, scale=0.3, window=window, softcap=softcap)
    expected = _truth(*qkv, 0.3, window, softcap, is_packed)
    # Scores of about 5 with float32 sums of 16 products, then softmax: a few units in the last place.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
    if not out.requires_grad:
        return
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * probe).sum(), qkv)
    for grad, truth in zip(grads, torch.autograd.grad((expected * probe).sum(), qkv), strict=True):
        torch.testing.assert_close(grad, truth, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("backend", "softcap"), [("sdpa", None), ("documents", None), ("explicit", 2.0)])
@pytest.mark.parametrize(("window", "is_packed"), CASES)
def test_a_backend_computes_the_formula(
    window: int | None, is_packed: bool, backend: str, softcap: float | None
) -> None:
    _check(backend, window, softcap, is_packed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "is_packed"), CASES)
def test_flex_computes_the_formula_with_a_cap(window: int | None, is_packed: bool) -> None:
    with torch.no_grad():  # it has no backward on the CPU
        _check("flex", window, 2.0, is_packed)


def _varlen_by_its_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """What the documentation of varlen_attn promises, without its kernels."""
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype is torch.int32
    left, right = options["window_size"]
    assert right == 0
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or options["enable_gqa"]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for start, stop in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        assert stop - start <= max_q == max_k
        for i in range(start, stop):
            first = start if left == -1 else max(start, i - left)
            scores = torch.einsum("nd,snd->ns", query[i], key[first : i + 1]) * options["scale"]
            outputs.append(torch.einsum("ns,snd->nd", scores.softmax(-1), value[first : i + 1]))
    return torch.stack(outputs)


@pytest.mark.parametrize("has_gqa", [True, False])
@pytest.mark.parametrize(("window", "is_packed"), CASES)
def test_varlen_is_called_so_that_it_computes_the_formula(
    window: int | None, is_packed: bool, has_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", _varlen_by_its_documentation)
    monkeypatch.setattr(attention, "_varlen_takes_groups", lambda: has_gqa)
    _check("varlen", window, None, is_packed)


def test_the_mark_of_a_constant_result_is_the_one_of_torch() -> None:
    theirs, ours = torch.compiler.assume_constant_result(lambda: 0), constant_result(lambda: 0)
    assert vars(ours) == vars(theirs)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors that claim to be on a GPU: shapes, dtypes and signatures are checked, nothing is computed."""
    monkeypatch.setattr(attention, "_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))  # torch 2.15 asks
    # no_grad: autograd looks for a real device
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


@pytest.mark.parametrize("window", [None, 16])
def test_varlen_accepts_our_call(fake_cuda: None, window: int | None) -> None:
    q = torch.empty(2, 48, 4, 16, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(2, 48, 2, 16, device="cuda", dtype=torch.bfloat16)
    documents = DocumentBounds.single(2, 48, "cuda")
    visible = make_visibility("varlen", documents, 2, 48, window, q.device)
    out = attend(q, k, k, visible, scale=0.25, window=window)
    assert out.shape == q.shape
    assert out.dtype is torch.bfloat16
    assert out.device.type == "cuda"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("varlen", "gemma3-tiny"),
        ("varlen", "smollm3-tiny"),
        ("flex", "gemma2-tiny"),
        ("flex", "mistral-tiny"),
        ("documents", "gemma3-tiny"),
        ("documents", "phi4-tiny"),
    ],
)
def test_a_model_gives_the_same_logits_with_every_backend(
    backend: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another model's soft cap in the same process would be a symbol, which flex of torch 2.15 does not take.
    torch._dynamo.reset()
    ours, _ = twins(CHECKPOINTS[name])
    tokens_BS = random_tokens(4, SEQ_LEN)
    with torch.no_grad():
        expected = [ours(tokens_BS, packed(LENGTHS)), ours(tokens_BS)]
        monkeypatch.setattr(attention, "choose_backend", lambda *args, **keys: backend)
        monkeypatch.setattr(varlen, "varlen_attn", _varlen_by_its_documentation)
        torch.testing.assert_close(ours(tokens_BS, packed(LENGTHS)), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours(tokens_BS), expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "backend"),
    [
        ("llama3_2-tiny", "cpu", torch.float32, None, "documents"),
        ("llama3_2-tiny", "cpu", torch.bfloat16, None, "documents"),
        ("gemma2-tiny", "cpu", torch.float32, None, "explicit"),
        ("llama3_2-tiny", "cuda", torch.bfloat16, (9, 0), "varlen"),
        ("llama3_2-tiny", "cuda", torch.float32, (9, 0), "sdpa"),
        ("llama3_2-tiny", "cuda", torch.float16, (7, 5), "sdpa"),
        ("gemma2-tiny", "cuda", torch.bfloat16, (9, 0), "flex"),
        ("gemma2-biases-no-caps", "cuda", torch.bfloat16, (9, 0), "varlen"),
    ],
)
def test_the_backend_follows_from_model_device_and_dtype(
    name: str,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_compute_capability", lambda device: capability)
    assert choose_backend(config_from_dict(CHECKPOINTS[name]), torch.device(device), dtype) == backend


def test_on_a_cpu_rows_of_one_document_and_small_float32_rows_keep_sdpa() -> None:
    config = config_from_dict(CHECKPOINTS["llama3_2-tiny"])  # 4 heads of 16
    chosen = functools.partial(choose_backend, config, CPU)
    assert chosen(torch.bfloat16, one_document_per_row=True) == "sdpa"
    assert [chosen(torch.float32, seq_len=length) for length in (511, 512)] == ["sdpa", "documents"]
    assert chosen(torch.bfloat16, seq_len=16) == "documents"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama3_2-tiny", "gemma2-tiny", "gemma3-tiny", "mistral-tiny", "phi4-tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_backends_equal_the_cpu_in_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    ours, _ = twins(CHECKPOINTS[name])
    tokens_BS, documents = random_tokens(4, SEQ_LEN), packed(LENGTHS)
    labels_BS = random_labels(tokens_BS)
    expected = ours(tokens_BS, documents, labels_BS)
    expected_grads = torch.autograd.grad(expected, list(ours.parameters()))
    ours.cuda().to(dtype)
    on_gpu = DocumentBounds(*(tensor.cuda() for tensor in documents))
    loss = ours(tokens_BS.cuda(), on_gpu, labels_BS.cuda())
    # TF32 is off by default. bf16 rounds each of about 20 steps to 2^-8, at random.
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(loss.cpu(), expected, rtol=tolerance, atol=0)
    for grad, truth in zip(torch.autograd.grad(loss, list(ours.parameters())), expected_grads, strict=True):
        assert (grad.cpu().float() - truth).norm() <= 5 * tolerance * truth.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama3_2-tiny", "gemma2-tiny", "gemma3-tiny"])
def test_compiled_blocks_equal_eager_blocks_on_the_gpu(name: str) -> None:
    ours, _ = twins(CHECKPOINTS[name])
    ours.cuda().bfloat16()
    tokens_BS = random_tokens(4, SEQ_LEN).cuda()
    documents = DocumentBounds(*(tensor.cuda() for tensor in packed(LENGTHS)))
    expected = ours(tokens_BS, documents)
    for block in ours.model.layers:
        block.compile(fullgraph=True)
    error = (ours(tokens_BS, documents) - expected).float().norm() / expected.float().norm()
    assert error <= 2e-2  # fusion keeps float32 where eager rounds to bf16
