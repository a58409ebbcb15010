"""A session: the process group of a run, its device and its mesh.

One rank and many are the same code. Without a launcher there is a process group of one (over an in-memory
store: no socket is opened), so that FSDP, DTensor and every collective below run in the single-device case
too.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from lptune import ranks
from lptune.config import (
    ParallelConfig,
    UserError,
    mesh_axes,
    no_gpu_error,
    printable,
    too_many_ranks_error,
)
from lptune.ranks import preemption
from lptune.trials import check_trials


class Boundary(NamedTuple):
    """What all ranks agree on between two steps."""

    stopped: signal.Signals | None
    """The signal that asked any rank to stop."""
    is_save_due: bool
    """What the main rank said."""


@dataclass(frozen=True)
class World:
    """This process among its ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Named axes, outermost first: `replicate` and `tensor` where they are larger than 1, `fsdp` always."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes what is written once."""
        return self.rank == 0

    @property
    def tensor_size(self) -> int:
        """Number of ranks that share each matrix, and therefore read the same data."""
        return self.size // self.data_size

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of tensor-parallel ones, that read different data."""
        return self.data_mesh.size()

    @property
    def data_rank(self) -> int:
        """Which of them this rank is in. The tensor axis is the innermost: its ranks are neighbours."""
        return self.rank // self.tensor_size

    @property
    def data_mesh(self) -> DeviceMesh:
        """What `fully_shard` takes: axis `fsdp`, or `replicate` and `fsdp`."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "tensor")
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """Axis `tensor`; None without tensor parallelism."""
        return self.mesh["tensor"] if "tensor" in (self.mesh.mesh_dim_names or ()) else None

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum of `value` over all data ranks, in float64; every rank gets it. A collective.

        Of tensor-parallel ranks, which hold the same value, the first one's counts.
        """
        total = torch.as_tensor(value, device=self.device).detach().to(torch.float64)
        if self.rank % self.tensor_size:
            total = torch.zeros_like(total)
        if self.size > 1:
            dist.all_reduce(total)
        return float(total.item())

    def sum_(self, values: torch.Tensor) -> None:
        """Replaces each of `values` by its sum over all ranks; the host does not wait. A collective."""
        if self.size > 1:
            dist.all_reduce(values)

    def max_(self, values: torch.Tensor) -> None:
        """Replaces each of `values` by its maximum over all ranks. A collective."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.sum(0)

    def stop_requested(self) -> signal.Signals | None:
        """The signal that asked any rank to stop, or None; all ranks get the same answer. A collective.

        A recipe asks before its first step and after each; before the first question a signal ends the
        process at once (lptune/ranks/preemption.py).
        """
        return self.at_boundary().stopped

    def at_boundary(self, is_save_due: bool = False) -> Boundary:
        """`stop_requested`, and in the same collective whether a save is due, by the main rank's
        `is_save_due`.
        """
        asked = [float(preemption.requested() or 0), float(self.is_main and is_save_due)]
        anywhere = torch.tensor(asked, device=self.device)
        self.max_(anywhere)
        number, due = anywhere.tolist()
        return Boundary(signal.Signals(int(number)) if number else None, bool(due))

    def seed(self, seed: int, step: int = 0) -> None:
        """Seeds torch, numpy and random: what this rank draws next is a function of (seed, step, data rank).

        lptune's own random numbers (data order, stochastic rounding) are functions of the config's seed
        and use no generator. This is for what a recipe of your own draws (dropout, augmentation): ranks that
        read different rows must not drop the same units, tensor-parallel ones must. Called in every step
        with the step's number, a resumed run draws what an uninterrupted one would have drawn.
        """
        words = np.random.SeedSequence([seed, step, self.data_rank]).generate_state(4)
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))
        np.random.seed(words[2])
        random.seed(int(words[3]))

    def print(self, text: str) -> None:
        """Prints on the main rank only, with escapes for control characters."""
        if self.is_main:
            print_line(text)


def print_line(text: str) -> None:
    """Prints `text` with escapes for control characters, above a progress bar where there is one."""
    # Only a terminal has a bar (training/metrics.py); elsewhere tqdm would make a lock of multiprocessing.
    with tqdm.external_write_mode() if sys.stderr.isatty() else nullcontext():
        print(printable(text), flush=True)


@contextmanager
def session(
    device: str = "auto",
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
    seed: int | None = None,
    deterministic: bool = False,
) -> Iterator[World]:
    """Joins the process group that the launcher describes (RANK, WORLD_SIZE, …), or makes one of a single
    rank.

    An exception that leaves the session ends all ranks of the launch.

    device: auto | cpu | cuda. parallel: decides the mesh. seed: see `World.seed`. deterministic: see the
    function of this name. Raises UserError when cuda is asked for and not there, and when the ranks cannot
    form the mesh. The group is destroyed at exit.
    """
    check_trials()
    device_type = _device_type(device)
    if parallel.cpu_offload and device_type != "cuda":
        raise UserError(
            "parallel.cpu_offload: moves weights out of a GPU's memory, and this runs on cpu; set it to false"
        )
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    axes = mesh_axes(parallel, size)
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise too_many_ranks_error(local_rank, torch.cuda.device_count())
        torch.cuda.set_device(local_rank)
        here = torch.device("cuda", local_rank)
    else:
        here = torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        try:
            dist.init_process_group(backend)
        except ValueError as error:  # a variable is missing, or no number
            raise UserError(
                f"RANK={rank} in the environment, but {str(error).rpartition('rendezvous: ')[2]}; unset what "
                "is left of a launcher, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        world = World(rank=rank, size=size, device=here, mesh=mesh)
        if seed is not None:
            world.seed(seed)
        with deterministic_algorithms() if deterministic else nullcontext():
            yield world
    except GeneratorExit:  # a session that was never closed, collected as garbage
        raise
    except BaseException as error:
        # Before the connections close, and peers fail that would be taken for the cause. With NCCL, closing
        # would wait for peers that wait for this rank.
        ranks.hold(error)
        raise
    finally:
        preemption.release()
        dist.destroy_process_group()
        # Gloo's thread drops the tensors of the last collective just after it completes, which takes the GIL;
        # in an interpreter that is finalizing by then it aborts the process (seen in 2 of 56 exits). Let it
        # have the GIL.
        time.sleep(0.1)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Within the block, and before the first use of CUDA, the same inputs give the same bits each time.

    Some CUDA kernels add by atomics, in whatever order the hardware comes to: the backward of flash attention
    and of an embedding, sums by index. Here their deterministic forms run, and what has none raises. cuBLAS
    keeps to a fixed workspace, and the compiler chooses among reductions without timing them. lptune's own
    kernels are deterministic in any case (lptune/kernels/triton/tuning.py).
    """
    import torch._inductor.config as inductor

    # Read when cuBLAS is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), inductor.deterministic
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    inductor.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        inductor.deterministic = before[1]
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _device_type(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise no_gpu_error("torch sees no CUDA device")
    return device
