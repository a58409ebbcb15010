"""torch's own tensor parallelism on a converted model: ColwiseParallel, RowwiseParallel, SequenceParallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lptune import distributed, linear
from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS, ParallelConfig, PrecisionConfig
from lptune.distributed import record_collectives
from lptune.kernels import HEADER_BYTES
from tests.helpers.ranks import Ranks

HIDDEN, INNER, ROWS, TOKENS = 64, 192, 2, 32
# int8_weight_only stores what distribute_tensor cannot cut.
KINDS = [kind for kind in PRECISION_KINDS if kind != "int8_weight_only"]
STAND = ["none", "int8_rowcol", "float8_tensorwise", "float8_blockwise"]
"""A kind for each way of scaling. A history, and others, by our styles: test_tensor_parallel.py."""


class _MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=bias), nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_MLP(bias=True), _MLP(bias=False), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))


def _plan(sequence: bool) -> dict[str, Any]:
    """The tutorial's: with `sequence`, everything between two products is cut by tokens."""
    plan: dict[str, Any] = {"3": ColwiseParallel(output_layouts=Replicate())}
    for block in ("0", "1"):
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    if not sequence:
        return plan
    tokens: Any = Shard(1)
    for block in ("0", "1"):
        plan[f"{block}.norm"] = SequenceParallel(use_local_output=False)
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=tokens, use_local_output=False)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    plan["0"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=tokens)
    plan["2"] = SequenceParallel(use_local_output=False)
    plan["3"] = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
    return plan


def _convert(model: nn.Module, kind: str) -> linear.Plan:
    plan = linear.convert(model, PrecisionConfig(kind=kind, emulate=not kind.startswith("int8")))
    linear.StochasticRounding(model, plan, seed=0).start(0, 0)
    return plan


def _train(model: nn.Module, plan: linear.Plan, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """The loss of each of two steps and the first one's gradients. Each step has two micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    linear.PrecomputedScales(model, optimizer)
    scaling = linear.DelayedScaling(plan, torch.device("cpu"), gradient_factor=num_ranks)
    generator = torch.Generator().manual_seed(1)
    results, losses = dict[str, Tensor](), list[Tensor]()
    first_step = linear.FirstStep(model, plan, enabled=True, report=lambda line: None)
    for step in range(2):
        x = torch.randn(2, ROWS, TOKENS, HIDDEN, generator=generator)
        mine = x.chunk(num_ranks)[rank]
        with first_step(num_passes=len(mine)), scaling.step():
            for batch in mine:
                loss = (model(batch) - batch.roll(1, dims=-1)).square().mean() / len(mine)
                loss.backward()
                losses.append(loss.detach())
        if step == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                results[f"gradient of {name}"] = whole
        optimizer.step()
        optimizer.zero_grad()
    results["losses"] = torch.stack(losses).view(2, -1).sum(dim=1)
    results["gathers"] = torch.tensor(first_step.verified.num_low_gathers)
    return results


def _on_a_mesh(rank: int, num_ranks: int, kinds: list[str]) -> dict[tuple[str, int, bool], dict[str, Tensor]]:
    found = {}
    cases = [(kind, 2, True) for kind in kinds]  # kind, data ranks, sequence parallelism
    cases += [("int8_rowcol", 1, False), ("float8_tensorwise", 1, True)]
    with distributed.session("cpu", ParallelConfig(tensor=num_ranks)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
        data_rank = mesh["fsdp"].get_local_rank()
        for kind, data_ranks, sequence in cases:
            model = _model()
            plan = _convert(model, kind)
            parallelize_module(model, mesh["tensor"], _plan(sequence))
            if data_ranks > 1:
                linear.gather_in_8_bits(model, torch.float32)
                policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
                for block in (*model[:2], model):
                    fully_shard(block, mesh=mesh["fsdp"], mp_policy=policy)
            results = _train(model, plan, data_rank if data_ranks > 1 else 0, data_ranks)
            dist.all_reduce(results["losses"])
            results["losses"] /= num_ranks
            found[kind, data_ranks, sequence] = results
    return found


def _gradients(results: dict[str, Tensor]) -> Tensor:
    return torch.cat([results[name].flatten() for name in sorted(results) if name.startswith("gradient")])


@pytest.mark.parametrize("kinds", [STAND, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_kind_trains_as_on_one_rank(kinds: list[str], ranks: Ranks) -> None:
    on_a_mesh, alone = ranks.run(_on_a_mesh, 4, kinds)[0], {}
    for kind in kinds:
        model = _model()
        alone[kind] = _train(model, _convert(model, kind), 0, 1)
    truth = alone["none"]
    assert len(on_a_mesh) == len(kinds) + 2
    for case, results in on_a_mesh.items():
        kind, data_ranks, _ = case
        noise, noise_alone = (
            (_gradients(each) - _gradients(truth)).norm() for each in (results, alone[kind])
        )
        if kind == "none":
            # Float32 sums in another order.
            assert noise < 1e-5 * _gradients(truth).norm(), case
            torch.testing.assert_close(results["losses"], truth["losses"], rtol=1e-5, atol=0)
            continue
        # Parts have scales of their own, never larger than the whole's. Two draws of the norm of a noise over
        # some 1e4 elements.
        assert 0.3 * noise_alone < noise < 1.1 * noise_alone, f"{case}: {noise:.5f}, alone {noise_alone:.5f}"
        gathered = PrecisionConfig(kind=kind).gathers_low and data_ranks == 2
        assert results["gathers"] == (5 if gathered else 0), case


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))


def test_an_input_that_is_no_dtensor_is_one_line() -> None:
    with distributed.session("cpu"):
        layer = nn.Linear(32, 32, bias=False)
        linear.convert(layer, PrecisionConfig(kind="int8_rowcol"))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), _mesh(), [Shard(0)]))
        with pytest.raises(UserError, match="cut over 1 ranks got an input that is no DTensor of that mesh"):
            layer(torch.ones(4, 32))


def _refused(rank: int, num_ranks: int) -> list[str]:
    messages = []
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        for kind, size in (("int8_rowcol", 48), ("int8_weight_only", 64)):
            model = nn.Sequential(nn.Linear(32, size))
            linear.convert(model, PrecisionConfig(kind=kind))
            assert world.tensor_mesh is not None
            with pytest.raises(UserError) as raised:
                parallelize_module(model, world.tensor_mesh, {"0": ColwiseParallel()})(torch.ones(4, 32))
            messages.append(str(raised.value))
    return messages


def test_parts_that_cannot_be_multiplied_are_one_line(ranks: Ranks) -> None:
    for uneven, stored in ranks.run(_refused, 2):
        assert "2 ranks leave 24 x 32 of a layer of 48 x 32" in uneven
        assert "int8_weight_only does not allow c10d.scatter_.default on its weights" in stored


class _Block(nn.Module):
    """x + mlp(norm(x)): the input of `mlp` is what tensor parallelism gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Sequential()
        self.mlp.up, self.mlp.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


FOLDED = {"kind": "int8_rowcol", "grad_weight": "folded"}
GATHERED_IN_8_BITS: dict[str, dict[str, Any]] = {"row": FOLDED, "tensor": {"kind": "int8_tensorwise"}}


def _with_our_styles(rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    """Two steps of a plan of a user's own, by torch's parallelize_module."""
    found = {}
    plan: dict[str, Any] = {
        "*.norm": distributed.Replicated(),
        "*.mlp.up": distributed.ColumnParallel(),
        "*.mlp.down": distributed.RowParallel(),
        "*.mlp": distributed.GatheredInput(),
    }
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        assert world.tensor_mesh is not None
        for shared, keys in GATHERED_IN_8_BITS.items():
            for gather in ("low", "high"):
                torch.manual_seed(0)
                model = nn.Sequential(_Block(), _Block())
                linear.convert(model, PrecisionConfig(tp_all_gather=gather, **keys))
                parallelize_module(model, world.tensor_mesh, plan)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                losses = []
                for _ in range(2):
                    x = torch.randn(ROWS, TOKENS, HIDDEN).chunk(num_ranks, dim=1)[rank]
                    with record_collectives() as executed:
                        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
                    gathers = [
                        each.num_bytes for each in executed.elements() if each.operation == "all_gather"
                    ]
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                weights = {name: each.to_local() for name, each in model.named_parameters()}  # type: ignore[attr-defined]
                found[f"{shared} {gather}"] = {
                    "losses": torch.stack(losses),
                    "gathers": torch.tensor(gathers),
                    **{name: weight.detach() for name, weight in weights.items()},
                }
    return found


def test_our_styles_in_a_users_plan_gather_in_8_bits_and_change_no_bit(ranks: Ranks) -> None:
    for found in ranks.run(_with_our_styles, 2):
        for shared in GATHERED_IN_8_BITS:
            low, high = found[f"{shared} low"], found[f"{shared} high"]
            header = HEADER_BYTES if shared == "row" else 0
            assert low.pop("gathers").tolist() == [ROWS * TOKENS * (HIDDEN + header)] * 2
            assert high.pop("gathers").tolist() == [ROWS * TOKENS * HIDDEN * 4] * 2
            for name, tensor in high.items():
                assert torch.equal(low[name], tensor), (shared, name)


def test_an_8_bit_gather_that_torchs_styles_do_not_make_is_one_line() -> None:
    with distributed.session("cpu"):
        layer = nn.Linear(32, 32, bias=False)
        linear.convert(layer, PrecisionConfig(tp_all_gather="low", **FOLDED))  # type: ignore[arg-type]
        parallelize_module(layer, _mesh(), ColwiseParallel())
        with pytest.raises(UserError, match=r"tp_all_gather: torch's styles gather .* in compute dtype"):
            layer(torch.ones(4, 32))


def _stochastic_gradients(rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Both ranks have the same numbers, so that only their random bits can make a difference."""
    found = {}
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        assert world.tensor_mesh is not None
        styles = {
            "column": ColwiseParallel(),
            "row": RowwiseParallel(),
            "column again": ColwiseParallel(),
            "column, ours": distributed.ColumnParallel(),
            "tokens": SequenceParallel(),
        }
        for name, style in styles.items():
            torch.manual_seed(0)
            layer = nn.Linear(32, 32, bias=False)
            half = layer.weight.detach()[:16, :16]
            layer.weight.data.copy_(half.repeat(2, 2))
            model, g = nn.Sequential(layer), torch.randn(8, 16)
            plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol", stochastic_rounding=True))
            rounding = linear.StochasticRounding(model, plan, seed=0)  # before or after: both are right
            parallelize_module(model, world.tensor_mesh, {"0": style})
            rounding.start(0, 0)
            x = torch.randn(8, 16)
            if name == "tokens":  # each rank has other tokens, which are equal here
                out = model(DTensor.from_local(x.repeat(1, 2)[None], world.tensor_mesh, [Shard(1)]))
                out.to_local().backward(g.repeat(1, 2)[None])
            else:
                out = model(x if name == "row" else x.repeat(1, 2))
                out.backward(g.repeat(1, out.shape[1] // 16))
            grad = layer.weight.grad
            assert isinstance(grad, DTensor)
            found[name] = grad.to_local()
    return found


def test_stochastic_rounding_has_bits_of_its_own_for_each_part_and_the_same_for_what_ranks_share(
    ranks: Ranks,
) -> None:
    first, second = ranks.run(_stochastic_gradients, 2)
    for name in ("column", "tokens"):
        assert not torch.equal(first[name], second[name]), name
    assert torch.equal(first["row"], second["row"])
    for found in (first, second):
        assert torch.equal(found["column"], found["column again"])
        assert torch.equal(found["column"], found["column, ours"])
