"""A number's gradients are computed with it, chunk by chunk, and are those of recomputed chunks or better."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import models
from lptune.distributed.compilation import compile_chunk_loss
from lptune.hardware.planned import planned_for
from lptune.models import chunks, summed_cross_entropy
from lptune.models.chunks import Logits, in_chunks
from lptune.models.loss import SummedCrossEntropy, is_number
from lptune.plan.memory import MemoryLog
from tests.helpers.models_oracle import CHECKPOINTS, random_labels, random_tokens, twins
from tests.helpers.slow import slow_but
from tests.models.test_loss import chunk_loss

V, T, H = 320, 96, 48
FACTOR = 0.3 / T
"""What follows the loss: no power of two."""


class Case:
    """A head, hidden states and labels, of which some are -100."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(H, V, bias=bias, dtype=dtype)
        with torch.no_grad():
            for each in self.head.parameters():
                each.normal_(0.0, 0.3, generator=generator)
        self.hidden_TH = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
        self.labels_T = torch.randint(0, V, (T,), generator=generator)
        self.labels_T[torch.rand(T, generator=generator) < 0.3] = -100

    def loss(
        self,
        num_chunks: int = 6,
        *,
        objective: models.Objective = summed_cross_entropy,
        module: Any = None,
        **options: Any,
    ) -> Tensor:
        """options: of in_chunks; parameters=None recomputes chunks in backward."""
        of_chunk = functools.partial(module or chunk_loss(V), self.head, objective)
        options = {"parameters": tuple(self.head.parameters())} | options
        tensors = [self.hidden_TH, self.labels_T]
        return in_chunks(of_chunk, tensors, V, max_logits=-(-T // num_chunks) * V, **options)

    def leaves(self) -> list[Tensor]:
        return [self.hidden_TH, *self.head.parameters()]

    def gradients(self, factor: float = FACTOR, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(**options) * factor, self.leaves())

    def truth(self) -> list[Tensor]:
        """The gradients in float64."""
        leaves = [each.detach().double().requires_grad_() for each in self.leaves()]
        loss = F.cross_entropy(F.linear(*leaves), self.labels_T, reduction="sum")  # type: ignore[arg-type]
        return list(torch.autograd.grad(loss * FACTOR, leaves))

    def errors(self, **options: Any) -> list[float]:
        """Of the hidden states and of each parameter: the relative error of the gradient."""
        pairs = zip(self.gradients(**options), self.truth(), strict=True)
        return [float((found - truth).norm() / truth.norm()) for found, truth in pairs]


class _Gemms(TorchDispatchMode):
    """Counts multiplications, in GEMMs of the head over all tokens."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.count += result.numel() * args[0].shape[1] / (T * V * H)
        return result


def _gemms(case: Case, **options: Any) -> float:
    """GEMMs of forward and backward."""
    with _Gemms() as counter:
        (case.loss(**options) * FACTOR).backward()
    return counter.count


def test_the_head_takes_three_gemms_for_each_token_and_recomputed_ones_take_four() -> None:
    case = Case()
    assert _gemms(case, num_chunks=1) == pytest.approx(3)
    assert _gemms(case) == pytest.approx(3)
    assert _gemms(case, parameters=None) == pytest.approx(4)
    case.head.requires_grad_(False)
    assert _gemms(case) == pytest.approx(2)
    assert _gemms(case, parameters=None) == pytest.approx(3)


def test_one_chunk_keeps_every_bit() -> None:
    case = Case()
    for found, expected in zip(
        case.gradients(num_chunks=1, expected_gradient=FACTOR),
        torch.autograd.grad(case.loss(1, parameters=None) * FACTOR, case.leaves()),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_the_expected_gradient_hidden_states_have_the_bits_of_recomputed_chunks(
    dtype: torch.dtype, bias: bool
) -> None:
    case = Case(dtype, bias=bias)
    found, expected = case.gradients(expected_gradient=FACTOR), case.gradients(parameters=None)
    assert torch.equal(case.loss(), case.loss(parameters=None))
    assert torch.equal(found[0], expected[0])
    for each, other in zip(found[1:], expected[1:], strict=True):
        # Both are sums of 6 gradients of `dtype`, each rounded once, and each sum of the other also.
        assert (each - other).norm() <= 7 * torch.finfo(dtype).eps * other.norm()


def test_the_gradient_of_the_head_is_nearer_to_float64_and_no_gradient_is_farther() -> None:
    case = Case()
    hidden, weight = case.errors(num_chunks=24, expected_gradient=FACTOR)
    other_hidden, other_weight = case.errors(num_chunks=24, parameters=None)
    assert hidden == other_hidden
    assert weight < 0.8 * other_weight
    # Not expected: another rounding to bfloat16, of at most 2**-9 of each element.
    unexpected, weight = case.errors(num_chunks=24)
    assert hidden < unexpected < hidden + 2**-9
    assert weight < 0.8 * other_weight


@pytest.mark.parametrize("expected", [0.0, float("nan"), float("inf")])
def test_an_expected_gradient_that_cannot_be_divided_by_is_refused(expected: float) -> None:
    with pytest.raises(ValueError, match="finite and not 0"):
        Case().loss(expected_gradient=expected)


def test_backward_can_run_twice_but_has_no_second_derivative() -> None:
    case = Case()
    loss = case.loss() * FACTOR
    first = torch.autograd.grad(loss, case.leaves(), retain_graph=True)
    for found, expected in zip(torch.autograd.grad(loss, case.leaves()), first, strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(case.loss(), case.leaves(), create_graph=True)


@pytest.mark.parametrize("frozen", ["head", "hidden states"])
def test_a_frozen_part_gets_no_gradient_and_the_other_its_own(frozen: str) -> None:
    case = Case()
    expected = case.gradients(expected_gradient=FACTOR)
    if frozen == "head":
        case.head.requires_grad_(False)
    else:
        case.hidden_TH.requires_grad_(False)
    (case.loss(expected_gradient=FACTOR) * FACTOR).backward()
    found = case.hidden_TH.grad, case.head.weight.grad
    for gradient, other, is_frozen in zip(found, expected, (frozen != "head", frozen == "head"), strict=True):
        assert gradient is None if is_frozen else torch.equal(gradient, other)


@pytest.mark.parametrize(
    "dtype", slow_but(lambda dtype: dtype == torch.bfloat16, (torch.float32, torch.bfloat16)), ids=str
)
def test_a_compiled_chunk_computes_its_gradients_in_forward(dtype: torch.dtype) -> None:
    case = Case(dtype)
    module = chunk_loss(V)
    compile_chunk_loss(module)
    found = case.gradients(module=module, expected_gradient=FACTOR)
    expected = case.gradients(module=module, parameters=None)
    assert torch.equal(found[0], expected[0])
    assert (found[1] - expected[1]).norm() <= 7 * torch.finfo(dtype).eps * expected[1].norm()


class _Scaled(SummedCrossEntropy):
    """With a trained number of its own."""

    def __init__(self) -> None:
        self.scale = torch.ones((), requires_grad=True)

    def values(self, logits: Logits, labels_t: Tensor) -> Tensor:
        return super().values(logits, labels_t) * self.scale


def test_a_trained_tensor_of_the_objective_gets_its_gradient_from_recomputed_chunks() -> None:
    case, objective = Case(torch.float32), _Scaled()
    assert is_number(objective)
    loss = case.loss(objective=objective)
    *found, scale = torch.autograd.grad(loss, [*case.leaves(), objective.scale])
    assert scale.item() == pytest.approx(loss.item(), rel=1e-5)
    for each, expected in zip(found, case.gradients(1.0, parameters=None), strict=True):
        assert (each - expected).norm() <= 1e-6 * expected.norm()


class _Inherits(SummedCrossEntropy):
    """Its result is not that of the class that says is_number."""

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t


class _Wrong(_Inherits):
    is_number = True
    result = _Inherits.result


def test_only_the_class_that_defines_the_result_says_whether_it_is_a_number() -> None:
    assert is_number(summed_cross_entropy)
    assert not is_number(models.log_probabilities)
    assert not is_number(_Inherits())
    with pytest.raises(ValueError, match=r"returned \(16,\) for a chunk"):
        Case().loss(objective=_Wrong())


@pytest.mark.parametrize("name", ["llama3_2-tiny", "gemma2-tiny", "granite3-tiny"])
def test_a_decoder_computes_the_gradients_of_its_loss_in_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tied and untied heads, a soft cap, a divisor of the logits.
    ours, _ = twins(CHECKPOINTS[name])
    tokens_BS = random_tokens(2, 24)
    labels_BS = random_labels(tokens_BS)

    def gradients() -> Sequence[Tensor]:
        loss = ours(tokens_BS, None, labels_BS, expected_gradient=FACTOR)
        return torch.autograd.grad(loss * FACTOR, list(ours.parameters()))

    monkeypatch.setattr(chunks, "MAX_LOGITS_PER_CHUNK", 256 * 10)
    calls: list[int] = []
    ours.lm_head.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    found = gradients()
    assert calls == [10, 10, 10, 10, 8]
    monkeypatch.setattr(chunks, "_computes_gradients", lambda *_: False)
    for (parameter, _), each, expected in zip(ours.named_parameters(), found, gradients(), strict=True):
        if "embed" in parameter or "lm_head" in parameter:
            assert (each - expected).norm() <= 7 * 2**-23 * expected.norm()
        else:
            assert torch.equal(each, expected), parameter


def test_the_peak_is_a_float32_sum_one_gradient_of_the_weight_and_one_of_the_logits() -> None:
    vocab_size, hidden_size, num_tokens = 128_256, 2048, 4096
    with FakeTensorMode(), MemoryLog() as log:
        head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=torch.bfloat16)
        hidden_TH = torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels_T = torch.randint(0, vocab_size, (num_tokens,))
        before = log.at_end().total()
        log.phase("loss")
        of_chunk = functools.partial(chunk_loss(vocab_size), head, summed_cross_entropy)
        parameters = tuple(head.parameters())
        loss = in_chunks(of_chunk, [hidden_TH, labels_T], vocab_size, parameters=parameters)
        log.phase("backward")
        (loss * FACTOR).backward()
        after = log.at_end().total() - before
    peaks = {name: found.total() - before for name, found in log.peaks().items()}
    weight, hidden, chunk_tokens = vocab_size * hidden_size, num_tokens * hidden_size, num_tokens // 4
    chunk = chunk_tokens * (vocab_size + hidden_size)  # gradients of logits and hidden states
    assert peaks["loss"] == pytest.approx(2 * hidden + 4 * weight + 2 * weight + 2 * chunk, rel=1e-3)
    # Both before and after g, and the sum.
    assert peaks["backward"] == pytest.approx(4 * hidden + 4 * weight + 2 * weight, rel=1e-3)
    assert after == pytest.approx(2 * hidden + 2 * weight, rel=1e-3)


def test_another_trained_tensor_in_a_later_chunk_is_found() -> None:
    """Its gradient would be lost."""
    hidden_TH, weight_HV = torch.arange(32.0).view(8, 4), nn.Parameter(torch.ones(4, 4))
    factor = nn.Parameter(torch.ones(()))

    def of_chunk(hidden_tH: Tensor) -> Tensor:
        total = (hidden_tH @ weight_HV).sum()
        return total if hidden_tH[0, 0] == 0 else total * factor

    in_chunks(of_chunk, [hidden_TH], 4, max_logits=16, parameters=[weight_HV]).backward()
    assert factor.grad == 4 * hidden_TH[4:].sum()


@pytest.mark.parametrize(("name", "times"), [("NVIDIA H100 80GB HBM3", 4), ("NVIDIA L40S", 1), (None, 4)])
def test_a_gpu_with_much_memory_takes_larger_chunks(name: str | None, times: int) -> None:
    device = torch.device("cpu")
    assert chunks.max_logits_per_chunk(device) == chunks.MAX_LOGITS_PER_CHUNK
    with planned_for("cuda", name=name):
        assert chunks.max_logits_per_chunk(device) == times * chunks.MAX_LOGITS_PER_CHUNK
