"""Checks of the number of ranks: against the mesh of `parallel.*`, and against the batch sizes."""

from typing import TYPE_CHECKING

from lptune.base.errors import UserError
from lptune.config.checks import num_micro_batches

if TYPE_CHECKING:
    from lptune.config.schema import ParallelConfig


def mesh_axes(parallel: "ParallelConfig", num_ranks: int) -> dict[str, int]:
    """Names and sizes of the mesh's axes, outermost first. Raises UserError where the ranks do not divide.

    Neighbouring ranks are on one machine, so `tensor`, which exchanges most, is the innermost axis; `fsdp`,
    which gathers weights, comes next; `replicate`, which only reduces gradients, is the outermost.
    """
    fixed = parallel.replicate * parallel.tensor
    if num_ranks % fixed:
        raise UserError(
            f"parallel: replicate={parallel.replicate} x tensor={parallel.tensor} needs a multiple of "
            f"{fixed} ranks, found {num_ranks}; change them or the number of ranks"
        )
    sizes = {"replicate": parallel.replicate, "fsdp": num_ranks // fixed, "tensor": parallel.tensor}
    return {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}


def check_batches(global_batch_size: int, micro_batch_size: int, num_ranks: int) -> None:
    """Raises UserError when the global batch cannot be cut into whole micro-batches, equally many per
    rank.
    """
    num_micro = num_micro_batches(global_batch_size, micro_batch_size)
    if num_micro % num_ranks:
        fitting = ", ".join(str(n) for n in range(1, num_micro + 1) if num_micro % n == 0)
        share, rest = divmod(global_batch_size, num_ranks)
        if rest:
            todo = f"set global_batch_size to a multiple of {num_ranks}"
        else:
            largest = max(n for n in range(1, min(share, micro_batch_size) + 1) if share % n == 0)
            todo = f"set micro_batch_size={largest}"
        raise UserError(
            f"global_batch_size: {global_batch_size} rows in micro-batches of {micro_batch_size} do not "
            f"divide among {num_ranks} data ranks; {todo}, or use one of these numbers of ranks: {fitting}"
        )
