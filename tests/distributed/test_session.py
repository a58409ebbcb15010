"""The mesh that a run's ranks form."""

import pytest

from lptune import distributed
from lptune.config import ParallelConfig, UserError
from lptune.distributed.session import mesh_axes


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "axes"),
    [
        ({}, 1, {"fsdp": 1}),
        ({}, 6, {"fsdp": 6}),
        ({"replicate": 2}, 6, {"replicate": 2, "fsdp": 3}),
        ({"tensor": 2}, 2, {"fsdp": 1, "tensor": 2}),
        ({"replicate": 2, "tensor": 8}, 64, {"replicate": 2, "fsdp": 4, "tensor": 8}),
    ],
    ids=str,
)
def test_what_replicas_and_tensor_parallelism_leave_is_the_fsdp_axis(
    parallel: dict[str, int], num_ranks: int, axes: dict[str, int]
) -> None:
    assert mesh_axes(ParallelConfig(**parallel), num_ranks) == axes  # type: ignore[arg-type]


def test_ranks_that_do_not_divide_are_one_line() -> None:
    message = r"parallel: replicate=2 x tensor=3 needs a multiple of 6 ranks, found 4"
    with pytest.raises(UserError, match=message):
        mesh_axes(ParallelConfig(replicate=2, tensor=3), 4)
    with (
        pytest.raises(UserError, match="needs a multiple of 2 ranks, found 1"),
        distributed.session("cpu", ParallelConfig(tensor=2)),
    ):
        pass


def test_cpu_offload_on_a_cpu_is_one_line() -> None:
    with (
        pytest.raises(UserError, match=r"parallel\.cpu_offload: moves weights out of a GPU's memory"),
        distributed.session("cpu", ParallelConfig(cpu_offload=True)),
    ):
        pass


def test_context_parallelism_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"parallel\.context: found 2.*packed documents"):
        ParallelConfig(context=2)
