"""The recorder counts what ran: what torch itself sees of an eager step, and no less of a compiled one."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune import distributed, linear
from lptune.config import PrecisionConfig
from lptune.distributed.collective_counts import Collective, record_collectives
from tests.helpers.ranks import Ranks

SIZE = 32
"""in and out of each layer; over 4 ranks 8 rows each, so nothing is padded."""


class OperatorsSeen(TorchDispatchMode):
    """(operator, bytes of its largest tensor argument) of each collective of an eager step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [t.numel() * t.itemsize for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.seen[func._schema.name.removeprefix("c10d::"), max(sizes)] += 1
        return func(*args, **(kwargs or {}))


def _model(mesh: DeviceMesh, compiled: bool = False, planted: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(2)))
    linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
    linear.gather_in_8_bits(model, torch.bfloat16)
    if planted:  # the second block's weight is gathered in high precision
        weight = model[1][0].weight
        plain = nn.Parameter(linear.plain_rows(weight.detach()))
        torch.utils.swap_tensors(weight, plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if compiled and block is model[1]:  # beside one that is not
            # FSDP's hooks stay outside the graph, so a quick backend tells as much as the usual one.
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(16, SIZE, dtype=torch.bfloat16)).float().sum().backward()


LOW = SIZE * (16 + SIZE) + 2 * SIZE
"""A block's gather: 16 + K bytes for each of N rows, and the bias in bfloat16."""
BLOCKS = dict.fromkeys(("0", "1"), (LOW, LOW - 2 * SIZE))
GRADIENTS = 4 * (SIZE * SIZE + SIZE)
"""What a block reduces, float32."""


def _compare_on_a_rank(rank: int, num_ranks: int) -> None:
    with distributed.session("cpu"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
        model = _model(mesh)
        assert linear.planned_gathers(model, torch.bfloat16) == BLOCKS
        with record_collectives(mesh) as counted, OperatorsSeen() as mode:
            _step(model)
        assert counted == {
            Collective("all_gather", "uint8", LOW, "fsdp"): 4,  # two blocks, for forward and for backward
            Collective("reduce_scatter", "float32", GRADIENTS, "fsdp"): 2,
            Collective("all_reduce", "float32", GRADIENTS // 2, "replicate"): 2,
        }
        assert mode.seen == {
            ("_allgather_base_", LOW): 4,
            ("_reduce_scatter_base_", GRADIENTS): 2,
            ("allreduce_", GRADIENTS // 2): 2,
        }
        assert counted.num_bytes(operation="all_gather", dtype="uint8") == 4 * LOW

        compiled = _model(mesh, compiled=True)
        with record_collectives(mesh) as counted_compiled:
            _step(compiled)
        assert counted_compiled == counted

        _functional_collectives(mesh)

        fsdp = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        _planted(fsdp)


def _functional_collectives(mesh: DeviceMesh) -> None:
    """As tensor parallelism calls them: in a graph, over one axis of the mesh."""

    tensor, other = mesh["fsdp"], mesh["replicate"]

    def exchange(x: torch.Tensor) -> torch.Tensor:
        gathered = DTensor.from_local(x, tensor, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
        partial = DTensor.from_local(gathered.float(), tensor, [Partial()])
        mine = partial.redistribute(placements=[Shard(0)]).to_local()
        reduced = DTensor.from_local(mine, other, [Partial()]).redistribute(placements=[Replicate()])
        return reduced.to_local() + 1

    compiled = torch.compile(exchange, fullgraph=True)
    expected = {
        Collective("all_gather", "bfloat16", 2 * 2 * 8, "fsdp"): 1,
        Collective("reduce_scatter", "float32", 4 * 2 * 8, "fsdp"): 1,
        Collective("all_reduce", "float32", 4 * 8, "replicate"): 1,
    }
    compiled(torch.ones(8, dtype=torch.bfloat16))  # traced and compiled before anybody records
    for function in (exchange, compiled):
        with record_collectives(mesh) as counted:
            function(torch.ones(8, dtype=torch.bfloat16))
        assert counted == expected, function
    # Nobody records: the kernels are gone, and the graph that ran with them still runs.
    compiled(torch.ones(8, dtype=torch.bfloat16))
    assert counted == expected


PLANTED = (
    r"all-gather in bfloat16, 2,112 bytes, 2 times; planned: 2 modules of 1,600 bytes, of which 2 gathers"
)


def _planted(mesh: DeviceMesh) -> None:
    """A block that gathers more than planned ends the step. 2 (32 * 32 + 32) = 2112."""
    lines: list[str] = []
    for planted in (False, True):
        model = _model(mesh, planted=planted)
        expected = pytest.raises(linear.PrecisionNotAppliedError, match=PLANTED) if planted else nullcontext()
        with expected, distributed.verify_collectives(model, mesh, torch.bfloat16, lines.append):
            _step(model)
        assert linear.planned_gathers(model, torch.bfloat16) == BLOCKS
    assert lines == [
        "collectives: all_gather uint8 4 x, 6.4 kB; reduce_scatter float32 2 x, 8.4 kB",
        "collectives: all_gather bfloat16 2 x, 4.2 kB; all_gather uint8 2 x, 3.2 kB; "
        "reduce_scatter float32 2 x, 8.4 kB",
    ]


def test_four_ranks_count_what_an_eager_dispatch_mode_sees_and_the_same_compiled(ranks: Ranks) -> None:
    ranks.run(_compare_on_a_rank, 4)


@pytest.mark.parametrize(("num_low", "holds"), [(4, True), (8, True), (0, False), (3, False)])
def test_activations_that_were_not_gathered_in_8_bits_as_planned_end_the_step(
    num_low: int, holds: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].token_gather = model[1].token_gather = "int8 rows"
    model[2].token_gather = "high"
    expectation = (
        nullcontext() if holds else pytest.raises(linear.PrecisionNotAppliedError, match="2 modules")
    )
    with expectation:
        linear.verify_token_gathers(model, num_low)


@pytest.mark.parametrize(("num_ranks", "holds"), [(1, True), (2, False)])
def test_a_planned_gather_that_did_not_run_ends_the_step_where_there_are_ranks_to_gather_from(
    num_ranks: int, holds: bool
) -> None:
    planned = {"layers.0": (640, 600), "layers.1": (480, 400), "": (64, 0)}
    expectation = (
        nullcontext() if holds else pytest.raises(linear.PrecisionNotAppliedError, match=r"size of layers\.1")
    )
    with expectation:
        linear.verify_gathers(planned, {("uint8", 640): 2}, num_ranks)
