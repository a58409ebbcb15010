"""On one rank: compute weights have the bits of FSDP2, and give the masters back."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import distributed, linear, models
from lptune.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from lptune.linear import ComputeWeights, GatheredWeight, MasterWeight
from lptune.training import Update, build_optimizer
from tests.helpers.slow import slow_but

NUM_STEPS, NUM_MICRO_BATCHES, BATCH, SEQ_LEN = 3, 2, 2, 32


@pytest.fixture
def world() -> Iterator[distributed.World]:
    with distributed.session("cpu") as world:
        yield world


def _execution(reshard: bool | None, **keys: Any) -> distributed.Execution:
    keys = {"compile": "none"} | keys
    return distributed.Execution(parallel=ParallelConfig(reshard_after_forward=reshard), **keys)


def _model(
    world: distributed.World, execution: distributed.Execution, kind: str = "none", preset: str = "llama3_1"
) -> tuple[models.Decoder, linear.Plan]:
    model = models.build_on_meta(models.config_from_dict(models.PRESETS[preset]["tiny"], "test"))
    kind, _, grad_input = kind.partition("/")
    emulate = kind.startswith(("float8", "mx"))
    precision = PrecisionConfig(kind=kind, emulate=emulate, grad_input=grad_input or "low")
    plan = linear.convert(model, precision, device=world.device)
    distributed.parallelize(model, world, execution)
    distributed.materialize(model, world, execution)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            distributed.on_this_rank(parameter).copy_(model.initial_value(name, seed=0))
    return model, plan


def _tokens(model: models.Decoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (BATCH, SEQ_LEN), generator=generator)


def _train(
    world: distributed.World, reshard: bool | None, kind: str, preset: str, **keys: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """(loss and gradient norm of each step and a held-out loss, the final weights by name)."""
    execution = _execution(reshard, **keys)
    model, plan = _model(world, execution, kind, preset)
    assert (ComputeWeights.of(model) is None) == (reshard is True)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    low = linear.LowPrecision(model, plan, optimizer, world=world, seed=0)
    update = Update(model, optimizer, world, 1.0, low)
    found = []
    for step in range(NUM_STEPS):
        with low.step(step, NUM_MICRO_BATCHES):
            loss_sum, batches = torch.zeros(()), range(NUM_MICRO_BATCHES)
            for number in distributed.accumulate(model, batches, world, execution, low):
                tokens_BS = _tokens(model, NUM_MICRO_BATCHES * step + number)
                loss = model(tokens_BS, None, tokens_BS)
                (loss / 100).backward()
                loss_sum += loss.detach()
        found.append(tuple(update(loss_sum, 100)))
        with torch.no_grad():
            found.append(model(tokens_BS, None, tokens_BS).item())
        distributed.reshard(model)
    weights = {
        name: distributed.full_tensor(linear.dequantized(each)) for name, each in model.named_parameters()
    }
    return found, weights


CASES = [(kind, "bfloat16") for kind in ("none", *linear.KINDS)]
# In float32 only 8-bit copies remain: one kind with row scales, and one whose ranks agree on a scale.
CASES += [(kind, "float32") for kind in ("none", "int8_rowcol", "float8_tensorwise")]
CASES += [("int8_rowcol/column", "bfloat16")]
OF_BFLOAT16 = ("none", "int8_rowcol/column", "int8_weight_only", "float8_delayed", "mxfp8")
"""Those that stand for the others there."""


# In float32 all; in bfloat16 what differs from another kind in more than its format.
@pytest.mark.parametrize(
    ("kind", "compute_dtype"),
    slow_but(
        lambda kind, dtype: dtype == "float32" or kind in OF_BFLOAT16,
        CASES,
    ),
)
def test_bits_are_those_of_fsdp(world: distributed.World, kind: str, compute_dtype: str) -> None:
    """With a tied head, whose weight has two gradients in each backward; with recomputation in backward."""
    keys = {"compute_dtype": compute_dtype, "activation_checkpointing": "full"}
    fsdp = _train(world, True, kind, "llama3_2", **keys)
    plain = _train(world, None, kind, "llama3_2", **keys)
    assert plain[0] == fsdp[0]
    assert len({repr(each) for each in plain[0]}) == len(plain[0]), "each step has weights of its own"
    assert plain[1].keys() == fsdp[1].keys()
    for name, weight in plain[1].items():
        assert torch.equal(weight, fsdp[1][name]), name


@pytest.mark.slow  # Compiled beside eager: recipes/test_full_finetune.py. Eager with and without them: above.
@pytest.mark.parametrize("kind", ["none", "int8_rowcol", "int8_weight_only"])
def test_compiled_blocks_have_the_same_bits(world: distributed.World, kind: str) -> None:
    torch._dynamo.reset()  # there is a limit of graphs in a process
    assert (
        _train(world, True, kind, "llama3_1", compile="block")[0]
        == (_train(world, False, kind, "llama3_1", compile="block")[0])
    )


class _Copies(TorchDispatchMode):
    """How often a whole weight of one shape is cast, copied or quantized."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # it calls operators on its parts, which come here
        name = func._schema.name
        if name.startswith("lptune::quantize") or name in (
            "aten::_to_copy",
            "aten::copy_",
            "aten::_foreach_copy_",
        ):
            inputs = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            if any(tuple(each.shape) == self.shape for each in inputs):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "quantizers"),
    [
        ("int8_rowcol", {"quantize_rows": 1}),
        ("int8_tensorwise", {"quantize_by_amax": 1}),
        ("float8_blockwise", {"quantize_by_amax": 1}),
        ("int8_weight_only", {}),
    ],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_weight_is_quantized_once_in_a_step_for_each_use(
    world: distributed.World, kind: str, quantizers: dict[str, int], checkpointing: str
) -> None:
    execution = _execution(None, activation_checkpointing=checkpointing)
    model, plan = _model(world, execution, kind)
    optimizer = build_optimizer(model, OptimizerConfig())
    low = linear.LowPrecision(model, plan, optimizer, world=world, verify=False)
    shape = tuple(model.model.layers[0].mlp.gate_proj.weight.shape)
    num_weights = sum(tuple(each.shape) == shape for each in model.parameters())
    for _ in range(2):
        with _Copies(shape) as copies:
            batches = range(3)
            for number in distributed.accumulate(model, batches, world, execution, _Open(low)):
                tokens_BS = _tokens(model, number)
                model(tokens_BS, None, tokens_BS).backward()
        counts = Counter(name for name in copies.names if name.startswith("lptune::"))
        assert counts == {f"lptune::{name}": times * num_weights for name, times in quantizers.items()}
        optimizer.step()
        optimizer.zero_grad()


class _Open:
    """A LowPrecision outside of a step."""

    def __init__(self, low: linear.LowPrecision) -> None:
        self._low = low

    def micro_batch(self, number: int) -> None:
        pass


def _is_masters(model: nn.Module) -> bool:
    return all(each.dtype == torch.float32 for each in model.parameters())


def test_the_masters_are_back_after_each_pass(world: distributed.World) -> None:
    model, _ = _model(world, _execution(None), "int8_rowcol")
    masters, tokens_BS = dict(model.named_parameters()), _tokens(model, 0)

    def holds_masters() -> bool:
        now = dict(model.named_parameters())
        return now.keys() == masters.keys() and all(now[name] is each for name, each in masters.items())

    loss = model(tokens_BS, None, tokens_BS)
    head, gate = model.lm_head.weight, model.model.layers[0].mlp.gate_proj.weight
    assert head.dtype == torch.bfloat16
    assert isinstance(gate, GatheredWeight)
    loss.backward()
    assert holds_masters()
    for name, each in masters.items():
        assert each.grad is not None, name
        assert type(each.grad) is Tensor, name
        assert each.grad.dtype == torch.float32, name
    with torch.no_grad():
        model(tokens_BS, None, tokens_BS)
    assert holds_masters()
    with torch.no_grad():
        hidden_BSH = model.hidden_states(tokens_BS)
        assert model.logits_of(hidden_BSH[0]).dtype == torch.bfloat16  # the head's weight is still there
    distributed.reshard(model)
    assert holds_masters()
    with contextlib.suppress(IndexError):
        model(tokens_BS + 10**6, None, tokens_BS)
    distributed.reshard(model)
    assert holds_masters()


@pytest.mark.parametrize("kind", ["none", "int8_rowcol", "float8_tensorwise"])
def test_a_write_to_a_master_is_seen(world: distributed.World, kind: str) -> None:
    model, _ = _model(world, _execution(None), kind)
    tokens_BS = _tokens(model, 0)

    @torch.no_grad()
    def loss() -> float:
        return model(tokens_BS, None, tokens_BS).item()

    first = loss()
    saved = {name: each.clone() for name, each in model.state_dict().items()}
    layer = model.model.layers[0].mlp.gate_proj
    with torch.no_grad():
        layer.weight.mul_(3.0)
    second = loss()
    assert second != first
    model.load_state_dict(saved)
    assert loss() == first
    with torch.no_grad():
        linear.plain_rows(layer.weight).mul_(3.0)  # as a checkpoint is loaded
    assert loss() == second
    model.load_state_dict(saved, assign=True)
    assert loss() == first


def test_two_forwards_before_two_backwards(world: distributed.World) -> None:
    """The second backward recomputes a forward after the first one has put the masters back."""
    gradients = []
    for together in (True, False):
        model, _ = _model(world, _execution(None, activation_checkpointing="full"), "int8_rowcol")
        one, other = (model(tokens, None, tokens) for tokens in (_tokens(model, 1), _tokens(model, 2)))
        if together:
            (one + other).backward()
        else:
            one.backward()
            other.backward()
        assert _is_masters(model)
        gradients.append([each.grad for each in model.parameters()])
    for sum_of_two, each in zip(*gradients, strict=True):
        assert sum_of_two is not None
        assert each is not None
        # bf16 gradients are added in bf16 within one backward.
        torch.testing.assert_close(sum_of_two, each, rtol=2**-7, atol=2**-7 * each.abs().max().item())


@pytest.mark.parametrize("kind", ["none", "int8_rowcol"])
def test_a_backward_through_weights_that_were_replaced_raises(world: distributed.World, kind: str) -> None:
    model, _ = _model(world, _execution(None), kind)
    head = model.model.layers[0].mlp.down_proj
    x = torch.randn(16, head.in_features, dtype=torch.bfloat16, requires_grad=True)
    weights = ComputeWeights.of(model)
    assert weights is not None
    weights.put_in_place()
    old = head(x)
    weights.take_out()
    with torch.no_grad():
        head.weight.mul_(3)
    weights.put_in_place()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.sum().backward()
    head(x).sum().backward()


@pytest.mark.parametrize("kind", ["int8_tensorwise", "int8_rowcol"])
def test_a_part_of_a_model_may_have_them(world: distributed.World, kind: str) -> None:
    """A policy with a head of its own, of which only the decoder is parallelized."""
    whole, execution = nn.Module(), _execution(None)
    whole.decoder = models.build_on_meta(models.config_from_dict(models.PRESETS["llama3_1"]["tiny"], "test"))
    plan = linear.convert(whole, PrecisionConfig(kind=kind), device=world.device)
    distributed.parallelize(whole.decoder, world, execution)
    distributed.materialize(whole.decoder, world, execution)
    with torch.no_grad():
        for name, parameter in whole.decoder.named_parameters():
            parameter.copy_(whole.decoder.initial_value(name, seed=0))
    low, tokens_BS = linear.LowPrecision(whole, plan, world=world), _tokens(whole.decoder, 0)
    with low.step(0, 1):
        whole.decoder(tokens_BS, None, tokens_BS).backward()


def test_a_weight_that_is_not_copied_in_8_bits_is_a_fault(world: distributed.World) -> None:
    model, plan = _model(world, _execution(None), "int8_rowcol")
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer.weight, MasterWeight)
    layer.weight = nn.Parameter(linear.plain_rows(layer.weight.detach()).clone())
    low = linear.LowPrecision(model, plan, world=world)
    tokens_BS = _tokens(model, 0)
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match=r"layers\.1\.mlp\.up_proj.*in high precision"),
        low.step(0, 1),
    ):
        model(tokens_BS, None, tokens_BS).backward()


class _Own(nn.Module):
    """A user's model, whose output `wrap` makes of the logits."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.wrap = nn.Embedding(50, 16), nn.Linear(16, 50), wrap

    def forward(self, tokens_BS: Tensor) -> Any:
        return self.wrap(self.head(self.embedding(tokens_BS)))


@dataclass
class _Output:
    logits: Tensor


def _losses(
    world: distributed.World,
    *,
    wrap: Callable[[Tensor], Any] = lambda logits: logits,
    logits_of: Callable[[Any], Tensor] = lambda output: output,
    before_backward: Callable[[nn.Module], object] = lambda model: None,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
) -> list[float]:
    """Of each step with a fused optimizer, which counts no writes. Gradients are set to None before backward,
    by the optimizer unless `before_backward` does it.
    """
    model, tokens_BS = _Own(wrap), torch.arange(20).view(2, 10)
    distributed.parallelize(model, world, _execution(None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(4):
        logits_BSV = logits_of(model(tokens_BS))
        loss = nn.functional.cross_entropy(logits_BSV.float().flatten(0, 1), tokens_BS.flatten())
        if before_backward(model) is None:
            optimizer.zero_grad()
        loss.backward()
        after_backward(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_weights_are_trained_whatever_forward_returns(world: distributed.World) -> None:
    """Also where no hook can be put on an output: in an object, or on a view that is changed in place."""
    expected = _losses(world)
    assert len(set(expected)) == 4
    assert _losses(world, wrap=_Output, logits_of=lambda output: output.logits) == expected
    twice = {"wrap": lambda x: x.transpose(0, 1).transpose(0, 1), "logits_of": lambda x: x.div_(1)}
    assert _losses(world, **twice) == expected


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_between_backward_and_the_update_keeps_no_old_weights(
    world: distributed.World, grad: bool
) -> None:
    tokens_BS = torch.arange(20).view(2, 10)

    def look(model: nn.Module) -> None:
        with torch.set_grad_enabled(grad):
            model(tokens_BS)

    assert _losses(world, after_backward=look) == _losses(world)


def test_zero_grad_between_forward_and_backward_is_of_the_masters(world: distributed.World) -> None:
    def zero(model: nn.Module) -> bool:
        model.zero_grad()
        return True

    assert _losses(world, before_backward=zero) == _losses(world)


def test_writes_to_data_between_evaluations_are_seen(world: distributed.World) -> None:
    """As by a library that exchanges weights for their averages; such writes are not counted."""
    model, _ = _model(world, _execution(None), "int8_rowcol")
    tokens_BS, losses = _tokens(model, 0), []
    for factor in (1.0, 2.0, 0.5):
        for each in model.parameters():
            each.data.mul_(factor)
        with torch.no_grad():
            losses.append(model(tokens_BS, None, tokens_BS).item())
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("kind", ["none", "int8_rowcol"])
def test_state_dict_and_load_state_dict_are_of_the_masters(world: distributed.World, kind: str) -> None:
    """Also after a forward whose backward an error prevented."""
    model, _ = _model(world, _execution(None), kind)
    tokens_BS = _tokens(model, 0)
    loss = model(tokens_BS, None, tokens_BS)
    saved = {name: each.clone() for name, each in model.state_dict().items()}
    assert {each.dtype for each in saved.values()} == {torch.float32}
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert model(tokens_BS, None, tokens_BS) != loss
    model.load_state_dict(saved)
    assert model(tokens_BS, None, tokens_BS) == loss


@pytest.mark.parametrize("kind", ["none", "int8_rowcol"])
def test_evaluation_in_inference_mode_comes_before_training(world: distributed.World, kind: str) -> None:
    model, _ = _model(world, _execution(None), kind)
    tokens_BS = _tokens(model, 0)
    with torch.inference_mode():
        evaluated = model(tokens_BS, None, tokens_BS).item()
    loss = model(tokens_BS, None, tokens_BS)
    loss.backward()
    assert loss.item() == evaluated


def test_hooks_of_a_master_run_when_its_gradient_is_there(world: distributed.World) -> None:
    """As FSDP2 runs them: an update in backward."""
    model, _ = _model(world, _execution(None), preset="llama3_2")
    seen = list[Tensor]()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(seen.append)
    tokens_BS = _tokens(model, 0)
    model(tokens_BS, None, tokens_BS).backward()
    assert {id(each) for each in seen} == {id(each) for each in model.parameters()}
    assert len(seen) == len(list(model.parameters()))


def test_a_copy_of_the_model_is_refused(world: distributed.World) -> None:
    """Its `hidden_states` would be those of the original, and its gradients lost. FSDP2 refuses it too."""
    model, _ = _model(world, _execution(None))
    with pytest.raises(TypeError, match="cannot be copied after parallelize"):
        copy.deepcopy(model)


def test_freezing_later(world: distributed.World) -> None:
    model, _ = _model(world, _execution(None))
    tokens_BS = _tokens(model, 0)
    model(tokens_BS, None, tokens_BS).backward()
    model.zero_grad()
    frozen = model.model.layers[0].self_attn.q_proj.weight
    frozen.requires_grad_(False)
    model(tokens_BS, None, tokens_BS).backward()
    assert frozen.grad is None
    assert sum(each.grad is None for each in model.parameters()) == 1
    frozen.requires_grad_(True)
    model(tokens_BS, None, tokens_BS).backward()
    assert frozen.grad is not None


def test_a_last_micro_batch_without_backward_keeps_no_old_weights(world: distributed.World) -> None:
    execution = _execution(None)
    model, plan = _model(world, execution)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    low, tokens_BS = linear.LowPrecision(model, plan, optimizer, world=world), _tokens(model, 0)
    losses = []
    for step in range(3):
        with low.step(step, 1):
            for number in distributed.accumulate(model, range(2), world, execution, low):
                if number == 0:
                    loss = model(tokens_BS, None, tokens_BS)
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_a_parameter_that_replaces_another_after_forward_stays(world: distributed.World) -> None:
    model, tokens_BS = _Own(lambda logits: logits), torch.arange(20).view(2, 10)
    distributed.parallelize(model, world, _execution(None))
    model(tokens_BS)  # without a backward
    model.head.weight = new = nn.Parameter(torch.zeros(50, 16))
    model(tokens_BS).sum().backward()
    assert model.head.weight is new
    assert new.grad is not None
