"""The 8-bit all-gather: half the bytes, and not a bit of difference."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import distributed, linear, training
from lptune.config import OptimizerConfig, PrecisionConfig, UserError
from lptune.linear import GatheredWeight, MasterWeight
from lptune.linear.row_tensor import HEADER_BYTES
from tests.launch import run_ranks

SIZES = (32, 48, 32, 16)
"""Over 3 ranks, 32 rows are 11, 11 and 10, and 16 rows are 6, 6 and 4."""
NUM_STEPS = 10
KINDS = ("int8_rowcol", "float8_rowwise", "float8_rowwise_with_gw_hp")


def _precision(kind: str, **keys: Any) -> PrecisionConfig:
    return PrecisionConfig(kind=kind, emulate=kind.startswith("float8"), **keys)


def _model(precision: PrecisionConfig, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [nn.Linear(k, n) for k, n in itertools.pairwise(SIZES)]
        model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))
    linear.convert(model, precision, device=torch.device("cpu"))
    return model


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
        if compiled:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)


def _train(model: nn.Sequential, rank: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Ten AdamW steps of two micro-batches: the losses, and all weights at the end."""
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    generator = torch.Generator().manual_seed(rank)
    results = {}
    for step, micro_batch in itertools.product(range(NUM_STEPS), range(2)):
        loss = model(torch.randn(24, SIZES[0], generator=generator).to(dtype)).float().square().sum()
        loss.backward()
        results[f"loss.{step}.{micro_batch}"] = loss.detach()
        if micro_batch == 1:
            training.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    distributed.reshard(model)
    for name, parameter in model.named_parameters():
        plain = linear.plain_rows(parameter)
        assert isinstance(plain, DTensor)
        results[name] = plain.full_tensor()
    return results


def _train_sharded(rank: int, num_ranks: int, folder: str, kind: str, gather: str, reshard: bool) -> None:
    with distributed.session("cpu") as world:
        model = _model(_precision(kind, all_gather=gather))
        _shard(model, world, reshard)
        masters = [isinstance(linear.plain_rows(p), DTensor) and _is_master(p) for p in model.parameters()]
        assert sum(masters) == (len(SIZES) - 1 if gather == "low" else 0)
        results = _train(model, rank)
        save_file(results, Path(folder) / f"{gather}-{reshard}-{rank}.safetensors")


def _is_master(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and isinstance(parameter.to_local(), MasterWeight)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_on_three_ranks_it_has_the_bits_of_a_high_precision_gather(tmp_path: Path, kind: str) -> None:
    for gather, reshard in (("high", True), ("low", True), ("low", False)):
        run_ranks(3, _train_sharded, str(tmp_path), kind, gather, reshard)
    for rank in range(3):
        expected = load_file(tmp_path / f"high-True-{rank}.safetensors")
        for reshard in (True, False):
            _assert_equal(load_file(tmp_path / f"low-{reshard}-{rank}.safetensors"), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"grad_input": "requantized"},
        {"grad_input": "high"},
        {"grad_weight": "folded"},
        {"grad_weight": "high"},
    ],
    ids=str,
)
def test_on_one_rank_every_way_of_multiplying_has_the_bits_of_a_high_gather(
    keys: dict[str, str], compiled: bool
) -> None:
    results = []
    for gather in ("high", "low"):
        torch._dynamo.reset()
        with distributed.session("cpu") as world:
            model = _model(_precision("int8_rowcol", all_gather=gather, **keys))
            _shard(model, world, True, compiled)
            results.append(_train(model, 0))
    _assert_equal(*results)


def test_a_scale_that_is_one_ulp_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from lptune.linear import master_weight

    def results() -> dict[str, Tensor]:
        # In float32: rounding the output to bfloat16 would hide an ulp of a scale nearly always.
        with distributed.session("cpu") as world:
            model = _model(_precision("int8_rowcol"))
            _shard(model, world, True, dtype=torch.float32)
            return _train(model, 0, torch.float32)

    def one_ulp_off(*args: Any, **kwargs: Any) -> Any:
        rows = quantize_rows(*args, **kwargs)
        rows.scale_M1[3] = torch.nextafter(rows.scale_M1[3], torch.tensor(torch.inf))
        return rows

    expected = results()
    _assert_equal(results(), expected)
    quantize_rows = master_weight.quantize_rows
    monkeypatch.setattr(master_weight, "quantize_rows", one_ulp_off)
    with pytest.raises(AssertionError):
        _assert_equal(results(), expected)


class _CountedGathers(TorchDispatchMode):
    """Bytes that each all-gather brings to a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.num_bytes.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def _count_bytes(rank: int, num_ranks: int, folder: str) -> None:
    counts = {}
    with distributed.session("cpu") as world:
        for gather in ("high", "low"):
            model = _model(_precision("int8_rowcol", all_gather=gather))
            _shard(model, world, False)
            with _CountedGathers() as counted:
                model(torch.randn(24, SIZES[0]).bfloat16())
            counts[gather] = torch.tensor(counted.num_bytes)
    if rank == 0:
        save_file(counts, Path(folder) / "counts.safetensors")


def test_the_bytes_on_the_wire_are_those_of_the_closed_form(tmp_path: Path) -> None:
    num_ranks = 3
    run_ranks(num_ranks, _count_bytes, str(tmp_path))
    counts = load_file(tmp_path / "counts.safetensors")
    low, high = [], []
    for k, n in itertools.pairwise(SIZES):
        rows = -(-n // num_ranks) * num_ranks
        bias = 2 * rows  # bfloat16, padded like the rows
        low.append(rows * (HEADER_BYTES + k) + bias)
        high.append(rows * 2 * k + bias)
    assert counts["low"].tolist() == low
    assert counts["high"].tolist() == high


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
    with pytest.raises(UserError, match=r"low is not there for precision\.kind: mxfp8; int8_rowcol"):
        PrecisionConfig(kind="mxfp8", all_gather="low")
    with pytest.raises(UserError, match=r"column quantizes the original weight.*all_gather=high"):
        PrecisionConfig(kind="int8_rowcol", grad_input="column", all_gather="low")
    assert not PrecisionConfig(kind="int8_rowcol", grad_input="column").gathers_low
    assert PrecisionConfig(kind="int8_rowcol").gathers_low


def test_without_gather_in_8_bits_a_sharded_layer_is_gathered_high_and_verifies() -> None:
    with distributed.session("cpu") as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
        plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
        fully_shard(model, mesh=world.mesh)
        with linear.verify_step(model, plan, 1) as verified:
            model(torch.randn(4, 32)).sum().backward()
        assert verified.num_low_gathers == 0
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
