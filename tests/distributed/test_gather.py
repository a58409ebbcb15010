"""The 8-bit all-gather: half the bytes, and not a bit of difference."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lptune import distributed, linear, training
from lptune.base.errors import UserError
from lptune.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from lptune.distributed import Collectives, record_collectives
from lptune.kernels import HEADER_BYTES, Packed, unpack_rows
from lptune.linear import GatheredWeight, MasterWeight
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_run import clip_grad_norm

SIZES = (32, 160, 32, 16)
"""Over 3 ranks, 160 rows are 54, 54 and 52, so that all of them have rows of the first block of 128, and the
last has its end; 32 rows are 11, 11 and 10, and 16 rows are 6, 6 and 4."""
NUM_STEPS = 6
ROWWISE = ("int8_rowcol", "int8_rotated", "float8_rowwise")
PRECOMPUTED = ("int8_tensorwise", "float8_tensorwise", "float8_blockwise", "bitnet")
KINDS = (*ROWWISE, *PRECOMPUTED, "float8_delayed")
RUNS = (("high", True), ("low", True), ("low", False))
"""How weights are gathered, and whether they are resharded after forward."""
STAND = ("int8_rowcol", "int8_tensorwise", "float8_blockwise", "float8_delayed", "bitnet")
"""A kind for each way of scaling. The others pack and scale by the same code, as on one rank below."""
OTHERS = tuple(kind for kind in KINDS if kind not in STAND)


def _precision(kind: str, **keys: Any) -> PrecisionConfig:
    return PrecisionConfig(kind=kind, emulate=kind.startswith("float8"), **keys)


def _model(precision: PrecisionConfig, device: str = "cpu") -> nn.Sequential:
    return _model_and_plan(precision, device)[0]


def _model_and_plan(precision: PrecisionConfig, device: str = "cpu") -> tuple[nn.Sequential, linear.Plan]:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [nn.Linear(k, n) for k, n in itertools.pairwise(SIZES)]
        # A weight of zeros has no history worth the name after the first step.
        nn.init.zeros_(layers[-1].weight)
        model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))
    return model, linear.convert(model, precision, device=torch.device("cpu"))


def _shard(
    model: nn.Sequential,
    world: distributed.World,
    reshard: bool,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    linear.gather_in_8_bits(model, dtype)
    for block in model:
        if compiled and block is model[1]:  # a block with all three GEMMs, and with rows longer than 128
            # By a backend that writes no C++, as in test_collectives.py; with inductor: `make matrix`.
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        fully_shard(block, mesh=world.data_mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=world.data_mesh, mp_policy=policy)


def _gathers(executed: Collectives) -> list[tuple[int, bool]]:
    """Bytes of each gather, in order of size, and whether they are bytes or bfloat16."""
    gathers = (each for each in executed.elements() if each.operation == "all_gather")
    return sorted((each.num_bytes, each.dtype == "uint8") for each in gathers)


def _train(
    model: nn.Sequential,
    plan: linear.Plan,
    world: distributed.World,
    dtype: torch.dtype = torch.bfloat16,
    num_steps: int = NUM_STEPS,
    compiled: bool = False,
) -> dict[str, Tensor]:
    """AdamW steps of two micro-batches, with an evaluation after the third and other weights loaded after
    the fourth: the losses, all weights at the end, the first forward's gathers and each step's all-reduces.

    compiled: the evaluation, which would be compiled once more, is left out.
    """
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    linear.PrecomputedScales(model, optimizer)
    scaling = linear.DelayedScaling(plan, world.device, world.max_)
    generator = torch.Generator().manual_seed(world.rank)

    def batch() -> Tensor:
        return torch.randn(24, SIZES[0], generator=generator).to(dtype)

    results, num_all_reduces = {}, []
    for step in range(num_steps):
        with record_collectives() as executed, scaling.step():
            for micro_batch in range(2):
                loss = model(batch()).float().square().sum()
                if step == micro_batch == 0:
                    results["gathers"] = torch.tensor(_gathers(executed))
                loss.backward()
                results[f"loss.{step}.{micro_batch}"] = loss.detach()
        num_all_reduces.append(executed.num_calls(operation="all_reduce"))
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and not compiled:
            with torch.no_grad():
                results["evaluated"] = model(batch())
        if step == 3:
            distributed.reshard(model)
            model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    results["all_reduces"] = torch.tensor(num_all_reduces)
    distributed.reshard(model)
    for name, parameter in model.named_parameters():
        plain = linear.plain_rows(parameter)
        assert isinstance(plain, DTensor)
        results[name] = plain.full_tensor()
    return results


def _is_master(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and isinstance(parameter.to_local(), MasterWeight)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert actual.keys() == expected.keys()
    for name in expected.keys() - {"gathers", "all_reduces"}:
        assert torch.equal(actual[name], expected[name]), f"{where} {name}"


def _bytes(kind: str, gather: str, num_ranks: int) -> list[int]:
    """The closed form of what each layer's gather brings: weight and bias, rows padded alike. In order."""
    header, in_byte = HEADER_BYTES if kind in ROWWISE else 0, 4 if kind == "bitnet" else 1
    sizes = [(-(-n // num_ranks) * num_ranks, k) for k, n in itertools.pairwise(SIZES)]
    return sorted(
        rows * (2 * k if gather == "high" else header + k // in_byte) + 2 * rows for rows, k in sizes
    )


def _check_kinds(rank: int, num_ranks: int, kinds: Sequence[str]) -> None:
    high: dict[str, dict[str, Tensor]] = {}
    with distributed.session("cpu") as world:
        for kind, (gather, reshard) in itertools.product(kinds, RUNS):
            if not reshard and (kind.endswith("_tensorwise") or kind == "bitnet"):
                continue  # as float8_blockwise: all precompute
            where = f"{kind} {gather} {reshard}"
            model, plan = _model_and_plan(_precision(kind, all_gather=gather))
            _shard(model, world, reshard)
            masters = sum(_is_master(parameter) for parameter in model.parameters())
            assert masters == (len(SIZES) - 1 if gather == "low" else 0)
            found = _train(model, plan, world)
            _assert_equal(found, high.setdefault(kind, found), where)  # the first of RUNS is high
            expected = [[size, gather == "low"] for size in _bytes(kind, gather, num_ranks)]
            assert found["gathers"].tolist() == expected, where
            all_reduces = found["all_reduces"].tolist()
            if kind == "float8_delayed":
                # One merges the amaxes of a step. A gathered weight without a history, as all are in the
                # first step and that of zeros is in the second, needs one at each gather.
                num_gathers = 4 if reshard else 2
                primed = [num_gathers * (len(SIZES) - 1), num_gathers] if gather == "low" else [0, 0]
                assert all_reduces == [1 + primed[0], 1 + primed[1], *[1] * (NUM_STEPS - 2)], where
            elif kind in PRECOMPUTED and gather == "low":
                # The evaluation has measured for the fourth step.
                assert all_reduces == [int(step != 3) for step in range(NUM_STEPS)], where
            else:
                assert not any(all_reduces), where


# Both of int8_tensorwise and float8_blockwise agree on amaxes.
@pytest.mark.parametrize(
    "kinds",
    [
        tuple(kind for kind in STAND if kind != "int8_tensorwise"),
        pytest.param(("int8_tensorwise", *OTHERS), marks=pytest.mark.slow),
    ],
)
def test_on_three_ranks_every_kind_has_the_bits_of_a_high_gather_at_half_the_bytes(
    ranks: Ranks, kinds: tuple[str, ...]
) -> None:
    ranks.run(_check_kinds, 3, kinds)


def _check_replicated(rank: int, num_ranks: int, kinds: Sequence[str]) -> None:
    with distributed.session("cpu", ParallelConfig(replicate=2)) as world:
        for kind in kinds:
            found = []
            for gather in ("high", "low"):
                model, plan = _model_and_plan(_precision(kind, all_gather=gather))
                _shard(model, world, True)
                histories = linear.DelayedScaling(plan, world.device, world.max_)
                with linear.verify_step(model, plan, 1) as verified, histories.step():
                    model(torch.randn(24, SIZES[0]).bfloat16().requires_grad_()).sum().backward()
                assert verified.num_low_gathers == (len(SIZES) - 1 if gather == "low" else 0)
                model.zero_grad()
                found.append(_train(model, plan, world, num_steps=3))
            _assert_equal(found[1], found[0], kind)
            assert found[1]["gathers"].tolist() == [[size, True] for size in _bytes(kind, "low", 2)]


# A scale for each weight, which all four agree on, and a history. The others: proofs/test_rank_matrix.py.
@pytest.mark.parametrize(
    "kinds",
    [
        ("int8_tensorwise", "float8_delayed"),
        pytest.param(
            tuple(kind for kind in KINDS if kind not in ("int8_tensorwise", "float8_delayed")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_with_two_replicas_of_two_ranks_every_way_of_scaling_has_the_bits_of_a_high_gather(
    ranks: Ranks, kinds: tuple[str, ...]
) -> None:
    ranks.run(_check_replicated, 4, kinds)


@pytest.mark.parametrize(
    ("kind", "keys", "compiled"),
    [
        ("int8_rowcol", {"grad_input": "requantized"}, False),
        ("int8_rowcol", {"grad_weight": "folded"}, False),
        ("int8_rowcol", {"grad_weight": "high"}, False),
        *((kind, {"grad_input": "high"}, False) for kind in KINDS if kind != "float8_rowwise"),
        ("float8_delayed", {}, True),  # a history that the graph reads
        pytest.param("int8_rowcol", {}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_one_rank_every_way_of_multiplying_has_the_bits_of_a_high_gather(
    kind: str, keys: dict[str, str], compiled: bool
) -> None:
    results = []
    for gather in ("high", "low"):
        torch._dynamo.reset()
        with distributed.session("cpu") as world:
            model, plan = _model_and_plan(_precision(kind, all_gather=gather, **keys))
            _shard(model, world, True, compiled)
            results.append(_train(model, plan, world, compiled=compiled))
    _assert_equal(*results)


@pytest.mark.parametrize("kind", STAND)
def test_a_scale_that_is_one_ulp_off_is_noticed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def results() -> dict[str, Tensor]:
        # In float32: rounding the output to bfloat16 would hide an ulp of a scale nearly always.
        with distributed.session("cpu") as world:
            model, plan = _model_and_plan(_precision(kind))
            _shard(model, world, True, dtype=torch.float32)
            return _train(model, plan, world, torch.float32, num_steps=3)

    def one_ulp_off(*args: Any, **kwargs: Any) -> Any:
        buffer, scale = pack_shard(*args, **kwargs)
        sent = unpack_rows(buffer, len(buffer), torch.int8).scale if scale is None else scale.clone()
        sent[-1] = torch.nextafter(sent[-1], torch.tensor(torch.inf))
        return Packed(buffer, None if scale is None else sent)

    expected = results()
    _assert_equal(results(), expected)
    pack_shard = linear.KINDS[kind].pack_shard
    monkeypatch.setattr(linear.KINDS[kind], "pack_shard", one_ulp_off)
    with pytest.raises(AssertionError):
        _assert_equal(results(), expected)


def _double(model: nn.Sequential) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _trained_once(world: distributed.World, kind: str, gather: str = "low") -> nn.Sequential:
    model = _model(_precision(kind, all_gather=gather))
    _shard(model, world, True)
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2))
    linear.PrecomputedScales(model, optimizer)
    model(_ones()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(_ones())
    distributed.reshard(model)
    return model


def _ones() -> Tensor:
    return torch.ones(4, SIZES[0], dtype=torch.bfloat16)


def _load(model: nn.Sequential, assign: bool) -> None:
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def _announce(model: nn.Sequential) -> None:
    _double(model)
    linear.weights_changed(model)


@pytest.mark.parametrize("kind", PRECOMPUTED)
def test_a_change_of_weights_that_is_announced_leaves_no_old_scale(kind: str) -> None:
    changes: list[Callable[[nn.Sequential], None]] = [
        _announce,
        lambda model: _load(model, False),
        lambda model: _load(model, True),
    ]
    with distributed.session("cpu") as world:
        expected = _trained_once(world, kind, "high")
        _double(expected)
        for change in changes:
            model = _trained_once(world, kind)
            change(model)
            assert torch.equal(model(_ones()), expected(_ones()))


def _through_the_state_dict(model: nn.Sequential) -> None:
    model.state_dict()["1.0.weight"].mul_(2)


def _one_element_of_the_rows(model: nn.Sequential) -> None:
    distributed.local_rows(model.get_parameter("1.0.weight"))[0].data[3, 4] = 7


def _by_another_optimizer(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.build_optimizer(model, OptimizerConfig(lr=1e-2)).step()


@pytest.mark.parametrize("kind", PRECOMPUTED)
@pytest.mark.parametrize(
    "change",
    [_double, _through_the_state_dict, _one_element_of_the_rows, _by_another_optimizer],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_change_of_weights_that_is_not_announced_is_an_error(
    kind: str, change: Callable[[nn.Sequential], None]
) -> None:
    with distributed.session("cpu") as world:
        model = _trained_once(world, kind)
        change(model)
        with pytest.raises(
            RuntimeError, match=r"layer \d\.0: its weight was changed .*weights_changed\(model\)"
        ):
            model(_ones())


@pytest.mark.parametrize("kind", [*PRECOMPUTED, "float8_delayed"])
def test_without_precomputed_scales_every_gather_measures(kind: str) -> None:
    with distributed.session("cpu") as world:
        models = []
        for gather in ("high", "low"):
            model, plan = _model_and_plan(_precision(kind, all_gather=gather))
            linear.DelayedScaling(plan, world.device)  # its histories stay empty
            _shard(model, world, True)
            models.append(model)
        for _ in range(2):
            high, low = (model(_ones()) for model in models)
            assert torch.equal(low, high)
            for model in models:
                distributed.reshard(model)
                _double(model)


def test_a_weight_that_an_evaluation_left_gathered_is_in_the_next_steps_history() -> None:
    histories = []
    for gather in ("high", "low"):
        with distributed.session("cpu") as world:
            model, plan = _model_and_plan(_precision("float8_delayed", all_gather=gather))
            _shard(model, world, False)
            scaling = linear.DelayedScaling(plan, world.device, world.max_)
            for _ in range(3):
                with torch.no_grad():
                    model(_ones())
                with scaling.step():
                    model(_ones()).sum().backward()
                _double(model)
            histories.append(torch.stack(list(scaling.state().values())))
    assert torch.equal(*histories)
    assert (histories[0][:2, -3:, 1] > 0).all()


@pytest.mark.parametrize("kind", [*PRECOMPUTED, "float8_delayed"])
def test_a_weight_that_tensor_parallelism_left_in_a_dtensor_has_the_bits_of_a_high_gather(kind: str) -> None:
    results = []
    for gather in ("high", "low"):
        with distributed.session("cpu") as world:
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tensor"))
            model, plan = _model_and_plan(_precision(kind, all_gather=gather))
            for name, layer in model.named_modules():
                if isinstance(layer, nn.Linear):
                    parallelize_module(model, mesh["tensor"], {name: distributed.ColumnParallel()})
            _shard(model, dataclasses.replace(world, mesh=mesh), True)
            results.append(_train(model, plan, world, num_steps=3))
    _assert_equal(*results)


def test_precomputed_scales_come_after_fully_shard() -> None:
    model = _model(_precision("int8_tensorwise"))
    linear.gather_in_8_bits(model, torch.bfloat16)
    with pytest.raises(UserError, match=r"make linear\.LowPrecision after fully_shard: 0\.0 is not sharded"):
        linear.PrecomputedScales(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_gathered_high_or_with_more_bytes_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from lptune.linear import module, verify

    def step(model: nn.Sequential, plan: linear.Plan) -> None:
        scaling = linear.DelayedScaling(plan, torch.device("cpu"))
        with linear.verify_step(model, plan, 1), scaling.step():
            model(_ones().requires_grad_()).sum().backward()

    with distributed.session("cpu") as world:
        model, plan = _model_and_plan(_precision(kind))
        _shard(model, world, True)
        step(model, plan)
        distributed.reshard(model)
        closed_form = verify.planned_bytes
        with monkeypatch.context() as patch:
            patch.setattr(verify, "planned_bytes", lambda *args: closed_form(*args) - 1)
            with pytest.raises(linear.PrecisionNotAppliedError, match="took"):
                step(model, plan)
        model, plan = _model_and_plan(_precision(kind))
        planted, make_master = model.get_submodule("1.0"), module.make_master
        monkeypatch.setattr(
            module, "make_master", lambda layer, *args: layer is planted or make_master(layer, *args)
        )
        _shard(model, world, True)
        with pytest.raises(linear.PrecisionNotAppliedError, match=r"layer 1\.0: .* came in high precision"):
            step(model, plan)


def test_forward_sees_8_bit_rows_in_the_buffer_that_fsdp_frees() -> None:
    with distributed.session("cpu") as world:
        model = _model(_precision("int8_rowcol"), "meta")
        _shard(model, world, True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        block: Any = model[0]
        for _ in range(2):
            block.unshard()
            weight = block[0].weight
            assert isinstance(weight, GatheredWeight)
            assert weight.dtype == torch.bfloat16
            assert weight.q_NK.dtype == torch.int8
            assert ((weight.q_NK.float() * weight.scale) == 0.5).all()
            storage = weight.q_NK.untyped_storage()
            assert storage.data_ptr() == weight.scale.untyped_storage().data_ptr()
            assert storage.size() == SIZES[1] * (HEADER_BYTES + SIZES[0])
            block.reshard()
            assert storage.size() == 0


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_plain_and_loading_one_keeps_the_8_bit_gather(assign: bool) -> None:
    with distributed.session("cpu") as world:
        model = _model(_precision("int8_rowcol"))
        _shard(model, world, True)
        state = model.state_dict()
        for name, tensor in state.items():
            assert isinstance(tensor, DTensor)
            assert type(tensor.to_local()) is Tensor, name
            assert tensor.dtype == torch.float32
        doubled = {name: 2 * tensor for name, tensor in state.items()}
        model.load_state_dict(doubled, assign=assign)
        for name, parameter in model.named_parameters():
            assert _is_master(parameter) == name.endswith("weight")
            assert torch.equal(linear.plain_rows(parameter).full_tensor(), doubled[name].full_tensor())  # type: ignore[attr-defined]
        model(torch.randn(4, SIZES[0]).bfloat16()).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_optimizer_state_is_plain() -> None:
    with distributed.session("cpu") as world:
        model = _model(_precision("int8_rowcol"))
        _shard(model, world, True)
        optimizer = training.build_optimizer(model, OptimizerConfig())
        model(torch.randn(4, SIZES[0]).bfloat16()).sum().backward()
        optimizer.step()
        for state in optimizer.state.values():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert type(state[moment].to_local()) is Tensor


def test_what_cannot_be_gathered_in_8_bits_is_one_line() -> None:
    with pytest.raises(UserError, match=r"low is not possible with precision\.kind: mxfp8; int8_rowcol"):
        PrecisionConfig(kind="mxfp8", all_gather="low")
    with pytest.raises(UserError, match=r"column quantizes the original weight.*all_gather=high"):
        PrecisionConfig(kind="int8_rowcol", grad_input="column", all_gather="low")
    assert not PrecisionConfig(kind="int8_rowcol", grad_input="column").gathers_low
    assert PrecisionConfig(kind="int8_rowcol").gathers_low


def test_without_gather_in_8_bits_a_sharded_layer_verifies_where_the_plan_says_high_and_only_there() -> None:
    with distributed.session("cpu") as world:
        for all_gather in ("auto", "high"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
            plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol", all_gather=all_gather))
            fully_shard(model, mesh=world.mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            error = linear.PrecisionNotAppliedError
            forgotten: Any = contextlib.nullcontext()
            if all_gather == "auto":
                forgotten = pytest.raises(error, match=r"call linear\.gather_in_8_bits\(model, compute_")
            with forgotten, linear.verify_step(model, plan, 1) as verified:
                model(torch.randn(4, 32)).sum().backward()
            with forgotten:
                optimizer.step()
        assert verified.num_low_gathers == 0
        with pytest.raises(UserError, match=r"gather_in_8_bits\(\) comes before fully_shard"):
            linear.gather_in_8_bits(model, torch.float32)
        with pytest.raises(UserError, match=r"convert\(\) comes before fully_shard"):
            linear.convert(fully_shard(nn.Linear(32, 32), mesh=world.mesh), "int8_rowcol")
        with pytest.raises(UserError, match="before fully_shard"):
            linear.unconvert(model)


def test_unconvert_gives_the_plain_weight_back_and_wrapping_twice_is_wrapping_once() -> None:
    model = nn.Sequential(nn.Linear(32, 48))
    before = model[0].weight.detach().clone()
    linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
    assert linear.gather_in_8_bits(model, torch.bfloat16) == 1
    assert linear.gather_in_8_bits(model, torch.bfloat16) == 0
    linear.unconvert(model)
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, before)
    with distributed.session("cpu") as world:
        fully_shard(model, mesh=world.mesh)
        x = torch.randn(4, 32)
        assert torch.equal(model(x), nn.functional.linear(x, before, model[0].bias))
