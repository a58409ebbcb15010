"""Layers that read one x quantize it once, in forward and in backward, and that changes nothing else."""

import contextlib
import copy
import functools
import itertools
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lptune import distributed, linear, models
from lptune.config import PRECISION_KINDS, ParallelConfig, PrecisionConfig
from tests.helpers.slow import slow_but

T, K, N = 48, 64, 32
BATCH, SEQ_LEN = 2, 18
KINDS = [kind for kind in PRECISION_KINDS if kind not in ("none", "int8_weight_only")]
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


@contextlib.contextmanager
def _executed() -> Iterator[Counter[tuple[str, bool]]]:
    """Counts the quantizers that run, compiled or not: by name, and whether tokens are the rows."""
    names = Counter[tuple[str, bool]]()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        yield names
    for event in profiled.events() or ():
        # Within a dispatch mode, such as that of selective checkpointing, a call of an op calls it again.
        outer = event.cpu_parent
        while outer is not None and outer.name != event.name:
            outer = outer.cpu_parent
        if event.name.startswith("lptune::quantize") and outer is None:
            names[event.name.removeprefix("lptune::"), event.input_shapes[0][0] == BATCH * SEQ_LEN] += 1


@pytest.mark.parametrize(
    ("compiled", "checkpointing"),
    slow_but(
        lambda compiled, checkpointing: compiled == "none" or checkpointing == "full",
        itertools.product(("none", "block"), ("none", "selective", "full")),
    ),
)
def test_a_step_quantizes_each_input_twice_and_each_weight_once(
    world: distributed.World, compiled: str, checkpointing: str
) -> None:
    num_micro_batches = 2
    torch._dynamo.reset()  # there is a limit of graphs in a process
    decoder = _decoder(world, "int8_rowcol", compile=compiled, activation_checkpointing=checkpointing)
    _step(world, decoder)
    for parameter in decoder[0].parameters():  # an update, which no optimizer made
        parameter.grad = None
    with _executed() as names:
        _step(world, decoder, num_micro_batches)
    # Selective checkpointing keeps the outputs of GEMMs; only full checkpointing runs them again, and the
    # compiler leaves out down_proj, whose output backward does not need.
    again = {"none": FOUR, "block": FOUR - 1}[compiled] if checkpointing == "full" else 0
    if (compiled, checkpointing) == ("none", "selective"):
        again = FOUR  # quantizers run again in eager recomputation, GEMMs do not
    assert names == {
        ("quantize_rows", True): (FOUR + again) * num_micro_batches,
        ("quantize_columns", True): FOUR * num_micro_batches,
        ("quantize_rows_and_columns", True): SEVEN * num_micro_batches,
        ("quantize_rows", False): SEVEN,
    }


MODES = [(kind, {}) for kind in KINDS]
MODES += [
    ("int8_rowcol", {"grad_weight": "folded"}),
    ("int8_rowcol", {"grad_weight": "high", "output": "high"}),
    ("int8_rowcol", {"grad_weight": "folded", "output": "high"}),
    ("int8_rowcol", {"grad_input": "column", "stochastic_rounding": True}),
    ("float8_tensorwise", {"stochastic_rounding": True}),
    ("mxfp8", {"output": "high"}),
]


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.slow), "full"])
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


@pytest.mark.parametrize("reshard", [None, True])
def test_weights_that_fsdp_frees_after_forward_change_nothing(
    world: distributed.World, reshard: bool | None
) -> None:
    with _Quantizers(BATCH * SEQ_LEN) as seen:
        _step(world, _decoder(world, "int8_rowcol", reshard=reshard))
    assert seen.names["quantize_rows"] == seen.names["quantize_columns"] == FOUR


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_a_transformers_model_shares_too(checkpointing: str, attention: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"]) | {"num_hidden_layers": 1}
    tokens = torch.randint(0, preset["vocab_size"], (BATCH, SEQ_LEN))
    found: list[list[Tensor]] = []
    for change in (lambda model: model, _alone):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**preset, attn_implementation=attention)
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


def test_three_readers_quantize_one_input_once_each_way() -> None:
    _assert_shares()


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


def test_a_second_backward_quantizes_again_and_drops_it_again() -> None:
    model, x = _projections(), _x()
    out = model(x)
    with _Quantizers() as seen:
        out.sum().backward(retain_graph=True)
        first = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        assert (seen.names["quantize_columns"], seen.num_alive()) == (1, 0)
        model.zero_grad()
        out.sum().backward()
    assert (seen.names["quantize_columns"], seen.num_alive()) == (2, 0)
    _assert_equal([each.grad for each in model.parameters() if each.grad is not None], first)


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


@pytest.mark.parametrize("frozen", [(), ("q_proj",), ("k_proj", "v_proj")])
def test_columns_go_with_the_last_reader_not_with_the_end_of_backward(frozen: tuple[str, ...]) -> None:
    alive = list[int]()
    model, x = _projections(), _x()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    before = x * 1
    before.register_hook(lambda gradient: alive.append(seen.num_alive()))  # runs when all readers have
    with _Quantizers() as seen:
        model(before).sum().backward()
    assert alive == [0]
    assert seen.names["quantize_columns"] == 1


def test_frozen_readers_take_no_part_in_backward() -> None:
    def only_v(model: Projections) -> None:
        model.q_proj.weight.requires_grad_(False)
        model.k_proj.weight.requires_grad_(False)

    def nothing(model: Projections) -> None:
        model.requires_grad_(False)

    _assert_shares(only_v)
    _assert_shares(nothing, columns=0)


def test_under_autocast_readers_share_though_each_casts_its_input() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(x)
        return out

    _assert_shares(run=run, dtype=torch.float32)

    def half(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = model.q_proj(x)
        out: Tensor = q + model.k_proj(x) + model.v_proj(x)
        return out

    _assert_shares(run=half, dtype=torch.float32, rows=2, columns=2)


def test_saved_tensors_may_be_packed() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each.clone()):
            out: Tensor = model(x)
        return out

    _assert_shares(run=run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_shares_by_itself(reentrant: bool) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(model, x, use_reentrant=reentrant)
        return out

    _assert_shares(run=run, rows=2)


def test_a_model_called_with_other_weights_shares() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        return out

    _assert_shares(run=run)


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


def test_folded_readers_save_one_8_bit_copy_of_their_input() -> None:
    model = _projections(grad_weight="folded")
    with _Quantizers() as seen:
        out = model(_x())
        assert (seen.names["quantize_rows"], seen.num_alive()) == (1, 2)
        out.sum().backward()
    assert seen.num_alive() == 0


def test_without_gradients_forward_shares_but_not_in_inference_mode() -> None:
    model = _projections()
    wanted = _alone(copy.deepcopy(model))(_x())
    for mode, rows in ((torch.no_grad, 1), (torch.inference_mode, 3)):
        with mode(), _Quantizers() as seen:  # type: ignore[operator]
            assert torch.equal(model(_x().detach().clone()), wanted)
        assert (seen.names["quantize_rows"], seen.num_alive()) == (rows, 0)


def test_a_copy_of_a_model_shares_within_itself() -> None:
    model, x = _projections(), _x()
    model.q_proj(x)  # the two others are to come
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with _Quantizers() as seen:
            copied.k_proj(x)
            assert (seen.names["quantize_rows"], seen.num_alive()) == (1, 2)
            model.k_proj(x)
        assert seen.names["quantize_rows"] == 1
        model.q_proj(_x())
        model.q_proj(x)
    linear.unconvert(model)
    assert type(model.q_proj) is nn.Linear
    assert not hasattr(model.q_proj, "input_group")


def test_threads_that_run_one_model_get_the_right_bits() -> None:
    model = _projections()
    inputs = [_x() * (1 + number) for number in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        wrong = list[int]()

        def run(number: int) -> None:
            with torch.no_grad():
                for _ in range(100):
                    if not torch.equal(model(inputs[number]), wanted[number]):
                        wrong.append(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


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


def test_compiled_autograd_gets_the_same_gradients() -> None:
    model, x = _projections(), _x()
    wanted = _gradients(model, x)
    model.zero_grad()
    x.grad = None
    out = model(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sum().backward()
    _assert_equal([out.detach(), *(each.grad for each in (x, *model.parameters()))], wanted)


@pytest.mark.filterwarnings("ignore")  # torch 2.13 calls torch.jit.trace deprecated
def test_torch_can_trace_readers() -> None:
    model, x = _projections(dtype=torch.float32), _x(torch.float32).detach()
    with torch.no_grad():
        traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
        assert torch.equal(traced(2 * x), model(2 * x))
