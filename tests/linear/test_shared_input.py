"""Layers that read one x quantize it once, in forward and in backward, and that changes nothing else."""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import distributed, linear, models
from lptune.config import PRECISION_KINDS, ParallelConfig, PrecisionConfig

T, K, N = 48, 64, 32
BATCH, SEQ_LEN = 2, 18
KINDS = [kind for kind in PRECISION_KINDS if kind != "none" and linear.KINDS[kind].operations]
SHARING = [kind for kind in KINDS if kind != "float8_delayed"]
"""Not the delayed kind: its quantizer writes each layer's own history."""
FOUR, SEVEN = 4, 7
"""Of a block: different inputs of its linear layers, and linear layers."""


class _Quantizers(TorchDispatchMode):
    """Counts the quantizers of matrices of `shape` (rows, or rows and columns), by name; remembers their
    8-bit results weakly.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.names = shape or (T, K), Counter[str]()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        quantizes = func.namespace == "lptune" and "quantize" in func.__name__
        if quantizes and args[0].shape[: len(self.shape)] == self.shape:
            self.names[func._opname] += 1
            self._made += [weakref.ref(each) for each in result]
        return result

    def num_alive(self) -> int:
        return sum(each() is not None for each in self._made)


class Projections(nn.Module):
    """Three readers of one x, in a module as transformers and lptune have it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q * k.sigmoid() + v.square()  # type: ignore[no-any-return]


def _projections(kind: str = "int8_rowcol", dtype: torch.dtype = torch.bfloat16, **keys: Any) -> Projections:
    torch.manual_seed(0)
    model = Projections().to(dtype)
    emulate = not kind.startswith("int8")
    linear.convert(model, PrecisionConfig(kind=kind, emulate=emulate, verify=False, **keys))
    return model


def _alone(model: nn.Module) -> nn.Module:
    """`model` without sharing, in place."""
    for module in model.modules():
        if isinstance(module, linear.LowPrecisionLinear):
            module.input_group = None
    return model


def _x(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """[output, gradients of x and of the weights and biases that have one]."""
    model.zero_grad()
    x.grad = None
    out = (run or model)(x)
    out.sum().backward()  # type: ignore[no-untyped-call]
    found = [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]
    return [out.detach(), *found]


def _assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def _assert_shares(
    change: Callable[[Projections], Any] = lambda model: None,
    *,
    rows: int = 1,
    columns: int = 1,
    run: Callable[[nn.Module, Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """With `change` and run by `run`: x is quantized as often as said, and the bits are those of layers that
    share nothing; nothing remains.
    """
    model = _projections(dtype=dtype)
    change(model)
    forward = functools.partial(run, model) if run else None
    with _Quantizers() as seen:
        found = _gradients(model, _x(dtype), forward)
    assert (seen.names["quantize_rows"], seen.names["quantize_columns"]) == (rows, columns)
    assert seen.num_alive() == 0
    _assert_equal(found, _gradients(_alone(model), _x(dtype), forward))


# --- The decoder: how often its step quantizes.


@pytest.fixture
def world() -> Iterator[distributed.World]:
    with distributed.session("cpu") as world:
        yield world


def _decoder(
    world: distributed.World,
    kind: str,
    *,
    reshard: bool | None = None,
    keys: dict[str, Any] | None = None,
    **how: str,
) -> tuple[models.Decoder, linear.Plan, distributed.Execution]:
    execution = distributed.Execution(
        parallel=ParallelConfig(reshard_after_forward=reshard), **({"compile": "none"} | how)
    )
    preset = models.PRESETS["llama3_1"]["tiny"] | {"num_hidden_layers": 1}
    model = models.build_on_meta(models.config_from_dict(preset, "test"))
    precision = PrecisionConfig(kind=kind, emulate=not kind.startswith("int8"), verify=False, **(keys or {}))
    plan = linear.convert(model, precision, device=world.device)
    distributed.parallelize(model, world, execution)
    distributed.materialize(model, world, execution)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            distributed.on_this_rank(parameter).copy_(model.initial_value(name, seed=0))
    return model, plan, execution


def _step(
    world: distributed.World,
    decoder: tuple[models.Decoder, linear.Plan, distributed.Execution],
    num_micro_batches: int = 1,
) -> list[Tensor]:
    """The losses of a step and all its gradients."""
    model, plan, execution = decoder
    optimizer = torch.optim.SGD(model.parameters())
    low = linear.LowPrecision(model, plan, optimizer, world=world, seed=0, verify=False)
    found = []
    generator = torch.Generator().manual_seed(2)
    with low.step(0, num_micro_batches):
        for _ in distributed.accumulate(model, range(num_micro_batches), world, execution, low):
            shape = (BATCH, SEQ_LEN)
            tokens_BS = torch.randint(0, model.config.vocab_size, shape, generator=generator)
            loss = model(tokens_BS, None, tokens_BS)
            (loss / 100).backward()
            found.append(loss.detach())
    return found + [
        distributed.on_this_rank(each.grad) for each in model.parameters() if each.grad is not None
    ]


MODES = [(kind, {}) for kind in KINDS]
MODES += [
    ("int8_rowcol", {"grad_weight": "folded"}),
    ("int8_rowcol", {"grad_weight": "high", "output": "high"}),
    ("int8_rowcol", {"grad_weight": "folded", "output": "high"}),
    ("int8_rowcol", {"grad_input": "column", "stochastic_rounding": True}),
    ("float8_tensorwise", {"stochastic_rounding": True}),
    ("mxfp8", {"output": "high"}),
]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("kind", "keys"), MODES, ids=str)
def test_no_bit_of_the_loss_or_of_a_gradient_depends_on_sharing(
    world: distributed.World, kind: str, keys: dict[str, Any], checkpointing: str
) -> None:
    shared = _decoder(world, kind, keys=keys, activation_checkpointing=checkpointing)
    alone = _decoder(world, kind, keys=keys, activation_checkpointing=checkpointing)
    _alone(alone[0])
    with _Quantizers(BATCH * SEQ_LEN) as few:
        found = _step(world, shared, 2)
    with _Quantizers(BATCH * SEQ_LEN) as many:
        wanted = _step(world, alone, 2)
    _assert_equal(found, wanted)
    assert len(found) == 2 + len(list(shared[0].parameters()))
    spec = next(each.spec for each in shared[0].modules() if isinstance(each, linear.LowPrecisionLinear))
    folded = spec.grad_weight == "folded"  # backward uses the 8-bit values of forward
    in_forward = (spec.output == "low" or folded) * (1 if checkpointing == "none" else 2)
    in_backward = spec.grad_weight != "high" and not folded
    saved = (SEVEN - FOUR) * (in_forward + in_backward) * 2
    assert (many.names - few.names).total() == (saved if kind in SHARING else 0)
    assert few.num_alive() == 0


@pytest.mark.parametrize("checkpointing", ["none", "not reentrant"])
def test_a_transformers_model_shares_too(checkpointing: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"]) | {"num_hidden_layers": 1}
    tokens = torch.randint(0, preset["vocab_size"], (BATCH, SEQ_LEN))
    found: list[list[Tensor]] = []
    for change in (lambda model: model, _alone):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**preset)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
        change(model)
        if checkpointing != "none":
            new_name = getattr(model, "activation_checkpointing_enable", None)
            enable = new_name or model.gradient_checkpointing_enable
            enable({"use_reentrant": checkpointing == "reentrant"})
        with _Quantizers(BATCH * SEQ_LEN) as seen:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        inputs = SEVEN if found else FOUR
        assert seen.names["quantize_rows"] == inputs * (1 if checkpointing == "none" else 2)
        assert seen.names["quantize_columns"] == inputs
        assert seen.num_alive() == 0
        found.append([loss.detach(), *(each.grad for each in model.parameters())])
    _assert_equal(*found)


# --- What else can happen to x and to its readers.


def test_a_reader_that_is_not_converted_or_has_other_settings_takes_no_part() -> None:
    def skip_k(model: Projections) -> None:
        linear.unconvert(model)
        linear.convert(model, PrecisionConfig(kind="int8_rowcol", verify=False, skip=("k_proj",)))

    def k_is_high(model: Projections) -> None:
        layer: Any = model.k_proj
        layer.spec = layer.spec._replace(output="high", grad_weight="high")

    def k_is_folded(model: Projections) -> None:
        layer: Any = model.k_proj
        layer.spec = layer.spec._replace(grad_weight="folded")

    _assert_shares(skip_k)
    # q; k needs no 8-bit x; v does not look for q's past k.
    _assert_shares(k_is_high, rows=2, columns=2)
    _assert_shares(k_is_folded, rows=3, columns=2)


def test_hooks_of_a_reader_get_tensors_and_another_input_is_quantized_by_itself() -> None:
    inputs = list[tuple[Any, ...]]()

    def watched(model: Projections) -> None:
        for layer in (model.q_proj, model.k_proj, model.v_proj):
            layer.register_forward_hook(lambda _, args, out: inputs.append((*args, out)))

    _assert_shares(watched)
    assert [[type(each) for each in call] for call in inputs] == [[Tensor, Tensor]] * 6

    def changed(model: Projections) -> None:
        model.k_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))

    _assert_shares(changed, rows=3, columns=3)

    def changed_first(model: Projections) -> None:
        model.q_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))

    _assert_shares(changed_first, rows=2, columns=2)


def test_a_write_to_the_input_between_two_readers_is_noticed() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            q = model.q_proj(x)
            with _Quantizers() as seen:
                x.mul_(2)
                out: Tensor = q + model.k_proj(x)
            assert seen.names["quantize_rows"] == 1
        return out

    model = _projections()
    found, wanted = run(model, _x()), run(_alone(model), _x())
    assert torch.equal(found, wanted)

    # In training autograd finds the write, as it does for any saved tensor.
    x = _x() * 1
    shared = _projections()
    q = shared.q_proj(x)
    x.mul_(2)
    out = q + shared.k_proj(x) + shared.v_proj(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]


def test_a_backward_for_some_of_the_readers_leaves_nothing_behind() -> None:
    model, x = _projections(), _x()
    wanted = _gradients(_alone(_projections()), _x())
    out = model(x)
    some: list[Tensor] = [model.q_proj.weight, model.k_proj.weight]
    for _ in range(2):
        with _Quantizers() as seen:
            found = torch.autograd.grad(out.sum(), some, retain_graph=True)
        assert (seen.names["quantize_columns"], seen.num_alive()) == (1, 0)
        assert torch.equal(found[0], wanted[2])
        assert torch.equal(found[1], wanted[4])
    with _Quantizers() as seen:
        out.sum().backward()
    assert (seen.names["quantize_columns"], seen.num_alive()) == (1, 0)


def test_nothing_in_8_bits_outlives_forward_or_its_input() -> None:
    model, x = _projections(), _x()
    with _Quantizers() as seen:
        q, k = model.q_proj(x), model.k_proj(x)
        assert seen.num_alive() == 2  # q and scale, for the third reader
        v = model.v_proj(x)
        assert seen.num_alive() == 0
        # The third reader is not called: x goes after backward, and the values with it.
        q, k = model.q_proj(x), model.k_proj(x)
        assert seen.num_alive() == 2
        (q + k + v).sum().backward()
        del x, q, k, v
        assert seen.num_alive() == 0
        with torch.no_grad():
            model.q_proj(_x())
        assert seen.num_alive() == 0


def test_a_buffer_that_is_filled_again_without_a_counted_write_is_quantized_again() -> None:
    model = _projections()
    inputs = [_x().detach(), 3 * _x().detach()]
    wanted = [_alone(copy.deepcopy(model)).q_proj(x) for x in inputs]
    x = torch.empty_like(inputs[0])
    for _ in range(2):
        for values, out in zip(inputs, wanted, strict=True):
            version = x._version
            x.data.copy_(values)  # as a collective, NumPy or a CUDA graph writes
            assert x._version == version
            assert torch.equal(model.q_proj(x), out)  # the two other readers are never called


def test_what_inference_mode_made_is_not_trained_on() -> None:
    model, x = _projections(grad_weight="folded"), _x()
    with torch.inference_mode():
        model.q_proj(x)
    model.k_proj(x).sum().backward()  # raises if it would save what was made in inference mode
