"""Shards on meshes of two axes: which rows of the whole tensor a rank holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lptune import distributed
from lptune.distributed import full_tensor, local_pieces, zeros_by_rows
from lptune.linear import placed_as
from lptune.linear.weights.master_weight import num_gathering_ranks
from tests.helpers.ranks import Ranks

FUSED_ROWS = (4, 4)
WHOLE_83 = torch.arange(24.0).view(8, 3)


def cut_by_both(mesh: DeviceMesh, rows: Tensor) -> DTensor:
    """(8, 3): tensor parallelism cut the rows over the last axis, then FSDP sharded them over the first."""
    placements = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
    )


def on_four_ranks(rank: int, num_ranks: int, check: Callable[[int, Any], None]) -> None:
    with distributed.session("cpu"):
        check(rank, lambda *names: init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _makes_state_by_rows(rank: int, mesh_of: Any) -> None:
    state = zeros_by_rows(cut_by_both(mesh_of("fsdp", "tensor"), torch.ones(2, 3)), (5,), torch.bfloat16)
    assert isinstance(state, DTensor)
    assert (state.shape, state.to_local().shape, state.dtype) == ((8, 5), (2, 5), torch.bfloat16)


def _leaves_offloaded_rows_in_host_memory(rank: int, mesh_of: Any) -> None:
    # FSDP offloads the rows of a mesh of GPUs. Here the mesh only says so: a copy to a GPU would raise.
    mesh, rows = mesh_of("fsdp", "tensor"), torch.ones(2, 3)
    weight = cut_by_both(mesh, rows)
    mesh._device_type = "cuda"
    same = placed_as(weight, rows, (8, 3))
    assert same.to_local().data_ptr() == rows.data_ptr()
    assert (same.shape, same.stride(), same.placements) == (weight.shape, weight.stride(), weight.placements)
    assert zeros_by_rows(weight, (1,), torch.float32).device.type == "cpu"


def _keeps_the_order_of_fused_rows(rank: int, mesh_of: Any) -> None:
    # Ranks (fsdp, tensor): tensor parallelism gives rank t the rows q_t and k_t, and FSDP halves these.
    fsdp, tensor = divmod(rank, 2)
    rows = WHOLE_83[4 * fsdp + 2 * tensor :][:2]
    weight = cut_by_both(mesh_of("fsdp", "tensor"), rows)
    for piece in local_pieces(weight, FUSED_ROWS):
        assert torch.equal(WHOLE_83[piece.region], piece.values)
    assert torch.equal(full_tensor(weight, FUSED_ROWS), WHOLE_83)


def _refuses_fused_rows_without_the_axis(rank: int, mesh_of: Any) -> None:
    weight = cut_by_both(mesh_of("dp", "tp"), torch.ones(2, 3))
    for order in (local_pieces, full_tensor):
        with pytest.raises(
            ValueError, match=r"axes \('dp', 'tp'\); call the axis of tensor parallelism `tensor`"
        ):
            order(weight, FUSED_ROWS)


def _counts_the_ranks_that_gather(rank: int, mesh_of: Any) -> None:
    for names in (("fsdp", "tensor"), ("dp", "tp")):
        assert num_gathering_ranks(cut_by_both(mesh_of(*names), torch.ones(2, 3))) == 2


@pytest.mark.parametrize(
    "check",
    [
        _makes_state_by_rows,
        _leaves_offloaded_rows_in_host_memory,
        _keeps_the_order_of_fused_rows,
        _refuses_fused_rows_without_the_axis,
        _counts_the_ranks_that_gather,
    ],
)
def test_rows_that_tensor_parallelism_cut_and_fsdp_sharded(
    ranks: Ranks, check: Callable[[int, Any], None]
) -> None:
    ranks.run(on_four_ranks, 4, check)
