"""A session: the process group of a run, its device and its mesh.

The code is the same for one rank and for many. Without a launcher the process group has one rank, a store in
memory and no socket, so that FSDP, DTensor and all collectives also run on a single device.
"""

import atexit
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lptune import launch
from lptune.base import progress
from lptune.base.errors import UserError, no_gpu_error, too_many_ranks_error
from lptune.base.text import fitted, printable
from lptune.config import ParallelConfig, mesh_axes
from lptune.distributed.compilation import CompileWatch
from lptune.hardware.host_memory import keep_freed_memory
from lptune.launch import preemption
from lptune.models import Group

_HINT_S = 15.0  # as the launcher's, which waits for other machines
_GROUP_TIMEOUT = timedelta(minutes=30)  # as gloo's


class Boundary(NamedTuple):
    """What all ranks have agreed on between two steps."""

    stopped: signal.Signals | None
    """The signal that asked a rank to stop; None: no rank was asked."""
    is_save_due: bool
    """Whether a save is due, by the main rank."""


class Experts(NamedTuple):
    """The ranks that have the experts of a mixture among them (expert_parallel.py)."""

    group: Group
    """Those that send each other tokens: neighbours on the axis `fsdp`."""
    mesh: DeviceMesh
    """All ranks, with the axes `fsdp` and `expert` in place of `fsdp`: of the weights of experts."""


@dataclass(frozen=True)
class World:
    """This process as a rank: device, mesh, and collectives over small values."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Named axes, outermost first: `replicate` and `tensor` if larger than 1, and always `fsdp`."""
    context: Group | None = None
    """The ranks that hold a part each of the same rows: neighbours on the axis `fsdp`; None: each rank (or
    group of tensor-parallel ranks) has whole rows."""
    experts: Experts | None = None
    """The ranks that have the experts of a mixture among them; None: each rank has all."""
    compile_watch: CompileWatch = field(default_factory=CompileWatch, compare=False)
    """Measures the time of torch.compile, from the first `parallelize` with compilation on."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, and writes what is written once."""
        return self.rank == 0

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that read the same rows: they share each matrix, or the tokens of each row."""
        return self.size // self.data_size

    @property
    def data_size(self) -> int:
        """Number of ranks (or groups of them, tensor-parallel or context-parallel) that read different data.
        A loop multiplies its loss by it, because FSDP averages gradients.
        """
        return self.token_size // (1 if self.context is None else self.context.size)

    @property
    def data_rank(self) -> int:
        """Index of this rank (or its group) among them; the ranks of a group are neighbours."""
        return self.rank // self.ranks_per_row

    @property
    def token_size(self) -> int:
        """Number of ranks (or groups of tensor-parallel ranks) with different tokens, of the same rows or of
        others.
        """
        return self.data_mesh.size()

    @property
    def token_rank(self) -> int:
        """Index of this rank (or its tensor-parallel group) among them."""
        return self.rank * self.token_size // self.size

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: axis `fsdp`, or `replicate` and `fsdp`."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "tensor")
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        """`data_mesh` for weights of experts that ranks have among them."""
        assert self.experts is not None
        mesh = self.experts.mesh
        return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "expert")]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The axis `tensor`; None without tensor parallelism."""
        return self.mesh["tensor"] if "tensor" in (self.mesh.mesh_dim_names or ()) else None

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum of `value` over all data ranks, in float64; every rank gets it. A collective.

        Ranks that read the same rows hold the same value, so only the value of the first one counts.
        """
        return self.sums(torch.as_tensor(value, device=self.device)[None])[0]

    def sums(self, values: torch.Tensor) -> list[float]:
        """`sum` of each of `values` (N,), in one collective."""
        totals = values.detach().to(torch.float64)
        if self.rank % self.ranks_per_row:
            totals = torch.zeros_like(totals)
        if self.size > 1:
            dist.all_reduce(totals)
        found: list[float] = totals.tolist()
        return found

    def sum_(self, values: torch.Tensor) -> None:
        """Replaces each of `values` by its sum over all ranks; the host does not wait. A collective."""
        if self.size > 1:
            dist.all_reduce(values)

    def max_(self, values: torch.Tensor) -> None:
        """Replaces each of `values` by its maximum over all ranks. A collective."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of the ranks; every rank gets all of them. A collective.

        value: what JSON can hold, so that nothing is pickled. Floats keep their bits, tuples become lists.
        """
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes)
        padded = torch.nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [
            json.loads(each[:size].cpu().numpy().tobytes())
            for each, size in zip(found, sizes.tolist(), strict=True)
        ]

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self.sum(0)

    def stop_requested(self) -> signal.Signals | None:
        """The signal that asked any rank to stop, or None; all ranks get the same answer. A collective.

        A recipe calls it before its first step and after each step. Before the first call a signal ends the
        process at once (lptune/launch/preemption.py).
        """
        return self.at_boundary().stopped

    def at_boundary(self, is_save_due: bool = False) -> Boundary:
        """`stop_requested` and, in the same collective, `is_save_due` of the main rank, for all ranks."""
        asked = [float(preemption.requested() or 0), float(self.is_main and is_save_due)]
        anywhere = torch.tensor(asked, device=self.device)
        self.max_(anywhere)
        number, due = anywhere.tolist()
        return Boundary(signal.Signals(int(number)) if number else None, bool(due))

    def seed(self, seed: int, step: int = 0) -> None:
        """Seeds torch, numpy and random: the next numbers are a function of (seed, step, `token_rank`).

        lptune's own random numbers (data order, stochastic rounding) are functions of the config's seed and
        use no generator. This is for dropout or augmentation in your own recipe: ranks that have different
        tokens must not drop the same units, tensor-parallel ranks must. If it is called in every step with
        the number of the step, a resumed run draws the same numbers as an uninterrupted one.
        """
        words = np.random.SeedSequence([seed, step, self.token_rank]).generate_state(4)
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))
        np.random.seed(words[2])
        random.seed(int(words[3]))

    def print(self, text: str) -> None:
        """Prints on the main rank only, with escapes for control characters."""
        if self.is_main:
            progress.print_line(fitted(text))

    @contextmanager
    def phase(
        self, what: str, *, total: float | None = None, in_background: bool = False
    ) -> Iterator[progress.Advance]:
        """`progress.phase` on the main rank. The time of torch.compile, which is told apart, is left out."""
        if not self.is_main:
            yield lambda _: None
            return

        def clock() -> float:
            return time.perf_counter() - self.compile_watch.duration_s

        with progress.phase(what, total=total, in_background=in_background, clock=clock) as advance:
            yield advance


@contextmanager
def session(
    device: str = "auto",
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
    seed: int | None = None,
    deterministic: bool = False,
) -> Iterator[World]:
    """Joins the process group that the launcher describes (RANK, WORLD_SIZE, …), or makes one with a single
    rank. Destroys the group at exit.

    An exception that leaves the block ends all ranks of the launch.

    device: auto | cpu | cuda. parallel: decides the mesh. seed: see `World.seed`. deterministic: see
    `deterministic_algorithms`. Raises UserError if cuda is asked for and missing, and if the number of ranks
    does not fit the mesh.
    """
    device_type = _device_type(device)
    if parallel.cpu_offload and device_type != "cuda":
        raise UserError(
            "parallel.cpu_offload: moves weights out of a GPU's memory, and this runs on cpu; set it to false"
        )
    rank, size = _launched_as()
    axes = mesh_axes(parallel, size)
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise too_many_ranks_error(local_rank, torch.cuda.device_count())
        torch.cuda.set_device(local_rank)
        here = torch.device("cuda", local_rank)
    else:
        here = torch.device("cpu")
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        with _meeting(rank, size):
            dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        sharing = neighbours(parallel, mesh)
        _outlast_hangs()
        world = World(rank=rank, size=size, device=here, mesh=mesh, **sharing)
        if seed is not None:
            world.seed(seed)
        with deterministic_algorithms() if deterministic else nullcontext(), closing(world.compile_watch):
            yield world
    except GeneratorExit:  # the session was never closed and is garbage-collected
        raise
    except BaseException as error:
        # Must come before the connections close: other ranks then fail, and would be taken for the cause.
        # With NCCL, closing would wait for ranks that wait for this one.
        launch.hold(error)
        raise
    finally:
        preemption.release()
        destroy_process_group()
        _wait_for_gloo_at_exit()


def neighbours(parallel: ParallelConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """The fields `context` and `experts` of a World, with process groups of their own. A collective."""

    def group(num_ranks: int) -> Group | None:
        return None if num_ranks == 1 else Group.of(dist.new_subgroups(num_ranks)[0])

    context, sharing = group(parallel.context), group(parallel.expert)
    if sharing is None:
        return {"context": context, "experts": None}
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    axes |= {"fsdp": axes["fsdp"] // parallel.expert, "expert": parallel.expert}
    of_experts = init_device_mesh(mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return {"context": context, "experts": Experts(sharing, of_experts)}


def destroy_process_group() -> None:
    """Ends the process group, so that another may follow in this process."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # DTensor keeps how it sharded, with the groups of a mesh that equals the next one.
        if clear := getattr(debug, "_clear_fast_path_sharding_prop_cache", None):
            clear()


@cache
def _wait_for_gloo_at_exit() -> None:
    """Gloo's thread drops the tensors of the last collective just after it completes, and needs the GIL for
    that. If the interpreter is finalizing by then, the process aborts (seen in 2 of 56 exits). The sleep is
    before that, and lets the thread have the GIL.
    """
    atexit.register(time.sleep, 0.1)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Makes CUDA give the same bits for the same inputs within the block. Enter it before CUDA is used.

    Some CUDA kernels add by atomics, in an order that the hardware decides: the backward of flash attention
    and of an embedding, and sums by index. Within the block their deterministic forms run; an operation
    without one raises. cuBLAS gets a fixed workspace, and the compiler chooses reductions without timing
    them. lptune's own kernels are always deterministic (lptune/kernels/triton/tuning.py).
    """
    import torch._inductor.config as inductor

    # cuBLAS reads this at its first use.
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


@contextmanager
def _meeting(rank: int, size: int) -> Iterator[None]:
    """Prints a line if the block, in which this rank meets the others, takes longer than `_HINT_S` seconds.

    If variables of an earlier launcher are left in the environment, no other rank comes, and torch waits for
    half an hour without a message. Raises UserError if the ranks cannot meet, unless lptune's launcher
    reports the cause.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    has_launcher = launch.LAUNCHER in os.environ
    todo = "" if has_launcher else "; if no launcher started it, unset RANK and WORLD_SIZE"

    def say() -> None:
        line = f"rank {rank} of {size} is waiting for the other ranks at {where}{todo}"
        print(printable(line), file=sys.stderr, flush=True)

    timer = threading.Timer(_HINT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ValueError as error:  # a variable is missing, or not a number
        raise UserError(
            f"RANK={rank} in the environment, but {str(error).rpartition('rendezvous: ')[2]}; unset what "
            "is left of a launcher, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from None
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if has_launcher:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"rank {rank} of {size} cannot meet the others at {where}: {reason}{todo}") from None
    finally:
        timer.cancel()


def _outlast_hangs() -> None:
    """Lets the launcher find a hang (lptune/launch/hangs.py) before process groups do. NCCL's own watchdog
    ends the processes after ten minutes, also of ranks that wait for one that works, and names nobody.
    """
    if (hang_timeout_s := launch.hang_timeout_s()) and dist.get_world_size() > 1:
        timeout = max(_GROUP_TIMEOUT, timedelta(seconds=2 * hang_timeout_s))
        for group in tuple(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _device_type(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise no_gpu_error("torch sees no CUDA device")
    return device


def _launched_as() -> tuple[int, int]:
    """(RANK, WORLD_SIZE) as the launcher set them; (0, 1) without RANK, whatever other variables are left."""
    if "RANK" not in os.environ:
        return 0, 1
    try:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise UserError(
            f"RANK or WORLD_SIZE in the environment: {error}; unset them, or set them right"
        ) from None
