"""INT8 weights under FSDP2: sharding by rows changes where they are, not a bit of them."""

import gc
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lptune import distributed, linear, training
from lptune.config import OptimizerConfig, PrecisionConfig
from lptune.linear import Int8Weight, dequantized, int8_rows
from tests.helpers.ranks import Ranks

INT8 = PrecisionConfig(kind="int8_weight_only")
SIZES = (32, 48, 32, 16)
"""Over 3 ranks, 32 rows are 11, 11 and 10, and 16 rows are 6, 6 and 4."""


def _model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [nn.Linear(k, n, bias=False) for k, n in itertools.pairwise(SIZES)]
        model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))
    linear.convert(model, INT8)
    return model


def _shard(model: nn.Sequential, world: distributed.World, dtype: torch.dtype, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)


def _train(model: nn.Sequential, share: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Three steps of two micro-batches: the losses, and all weights at the end."""
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1), seed=5)
    generator = torch.Generator().manual_seed(1)
    results = {}
    for step in range(3):
        for micro_batch in range(2):
            x = torch.randn(24, SIZES[0], generator=generator).to(dtype)
            loss = model(x).float().square().sum()
            (share * loss).backward()
            results[f"loss.{step}.{micro_batch}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    distributed.reshard(model)
    for name, parameter in model.named_parameters():
        rows = int8_rows(parameter)
        assert rows is not None
        assert rows.q_NK.dtype == torch.int8
        full = dequantized(parameter)
        results[name] = full.full_tensor() if isinstance(full, DTensor) else full
    return results


def _train_sharded(rank: int, num_ranks: int, reshard: bool) -> dict[str, Tensor]:
    with distributed.session("cpu") as world:
        model = _model()
        _shard(model, world, torch.bfloat16, reshard)
        # Gradients are summed and come from the first rank alone: g + 0 + 0 is g to the bit.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return _train(model, float(rank == 0), torch.bfloat16)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_training_on_three_ranks_with_uneven_rows_is_bitwise_that_without_fsdp(ranks: Ranks) -> None:
    expected = _train(_model(), 1.0, torch.bfloat16)
    _assert_equal(ranks.run(_train_sharded, 3, True)[0], expected)


@pytest.mark.parametrize(("dtype", "reshard"), [(torch.bfloat16, True), (torch.float32, False)])
def test_training_on_one_rank_is_bitwise_that_without_fsdp(dtype: torch.dtype, reshard: bool) -> None:
    expected = _train(_model(), 1.0, dtype)
    with distributed.session("cpu") as world:
        model = _model()
        _shard(model, world, dtype, reshard)
        _assert_equal(_train(model, 1.0, dtype), expected)


def test_what_is_gathered_is_int8_and_lives_in_the_buffer_that_fsdp_frees() -> None:
    with distributed.session("cpu") as world:
        model = _model("meta")
        _shard(model, world, torch.bfloat16, True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                assert isinstance(int8_rows(parameter), Int8Weight)
                parameter.fill_(0.5)
        assert isinstance(model[0], FSDPModule)
        seen = []
        for _ in range(2):
            model[0].unshard()
            weight = model[0][0].weight
            assert isinstance(weight, Int8Weight)
            assert weight.dtype == torch.bfloat16
            assert (weight.dequantize() == 0.5).all()
            storage = weight.q_NK.untyped_storage()
            assert storage.data_ptr() == weight.scale_N1.untyped_storage().data_ptr()
            # A row: 16 bytes that begin with the scale, and a byte for each value.
            assert storage.size() == SIZES[1] * (16 + SIZES[0])
            model[0].reshard()
            assert storage.size() == 0
            seen.append(weight)
        assert seen[0] is seen[1]


def _plain_tensors() -> list[Tensor]:
    """All in this process."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]


def test_between_steps_no_float_copy_of_a_sharded_weight_is_alive_but_the_moments() -> None:
    before = _plain_tensors()  # of other tests; kept, so that no id comes back
    known = {id(tensor) for tensor in before}
    with distributed.session("cpu") as world:
        model = _model("meta")
        _shard(model, world, torch.float32, True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        optimizer = training.build_optimizer(model, OptimizerConfig())
        for _ in range(2):
            model(torch.randn(4, SIZES[0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        smallest = min(k * n for k, n in itertools.pairwise(SIZES))
        alive = {
            each.untyped_storage().data_ptr()
            for each in _plain_tensors()
            if id(each) not in known
            and each.is_floating_point()
            and each.untyped_storage().size() >= smallest * each.itemsize
        }
        moments = [
            optimizer.state[p][moment].to_local()
            for p in model.parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        assert alive == {moment.untyped_storage().data_ptr() for moment in moments}
        sizes = list(itertools.pairwise(SIZES))
        held = [int8_rows(parameter) for parameter in model.parameters()]
        assert sum(w.q_NK.nbytes + w.scale_N1.nbytes for w in held if w is not None) == sum(
            k * n + 4 * n for k, n in sizes
        )
        assert sum(moment.nbytes for moment in moments) == 8 * sum(k * n for k, n in sizes)


def test_state_dicts_of_a_sharded_model_are_plain_and_bring_every_bit_back() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    with distributed.session("cpu") as world:
        model, unsharded = _model(), _model()
        _shard(model, world, torch.float32, True)
        own = model.state_dict()
        assert all(isinstance(value, DTensor) and type(value.to_local()) is Tensor for value in own.values())
        full = get_model_state_dict(model, options=options)
        assert full.keys() == unsharded.state_dict().keys()
        expected = unsharded.state_dict()
        _assert_equal(full, expected)
        for load in (
            lambda target: target.load_state_dict(own),
            lambda target: set_model_state_dict(target, full, options=options),
        ):
            other = _model()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            _shard(other, world, torch.float32, True)
            load(other)
            _assert_equal(get_model_state_dict(other, options=options), expected)
