"""Ranks that stay: processes started once, which form a process group anew for every job.

    with Ranks(4) as ranks:
        found = ranks.run(job, 2, argument)     # [job(0, 2, argument), job(1, 2, argument)]
        found = ranks.run(other_job, 4)

Ranks are forks of a process that has imported torch and lptune (tests/helpers/fork_server.py). What they have
compiled stays in memory. A job takes the first n ranks and opens its own `distributed.session`, so its mesh
and its group are a run's own and end with it. Everything goes over gloo on the loopback device.
`run_ranks` has ranks of its own for one job, so nothing of an earlier one is in their memory.

One rank's error must not wedge the others: they would wait for it in a collective. Its session ends with its
error, which closes its connections, so the others fail as well; who has not within GRACE_S is killed. After
any failure the processes are replaced by new ones.
"""

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.helpers import fork_server
from tests.helpers.launch import free_port, rank_environment

GRACE_S = 10.0
"""What ranks have to notice that another one failed."""


class RanksFailed(RuntimeError):  # noqa: N818  (a report, not a bug of this module)
    """A job that raised, died or took too long on some rank; says which and why."""


class Ranks:
    """Up to `num_ranks` processes, started when a job needs them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks = tempfile.TemporaryDirectory(prefix="lptune-ranks-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._stacks.cleanup()

    def run(
        self, job: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 400.0
    ) -> list[Any]:
        """`job(rank, num_ranks, *arguments)` on the first `num_ranks` ranks: what each returned.

        `job` is a function at the top of a module, and what it takes and returns can be pickled. Raises
        RanksFailed with the first error of a rank, or the ranks that were not done after `timeout_s` and
        where they were.
        """
        assert 1 <= num_ranks <= self.num_ranks
        self._start(num_ranks)
        port = free_port()
        for rank in range(num_ranks):
            self._pipes[rank].send((job, rank, num_ranks, port, arguments))
        results, errors = self._collect(num_ranks, time.monotonic() + timeout_s)
        if errors:
            self.close()
            raise RanksFailed("\n".join(errors))
        return [results[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """Ends the processes; a later job starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank returns from its loop
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self, num_ranks: int) -> None:
        while len(self._processes) < num_ranks:
            ours, theirs = fork_server.pipe()
            rank = len(self._processes)
            process = fork_server.process(_rank_loop, theirs, str(self._stack_file(rank)), daemon=True)
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, num_ranks: int, deadline: float) -> tuple[dict[int, Any], list[str]]:
        """What the ranks returned, and errors in the order in which they came."""
        waiting = {self._pipes[rank]: rank for rank in range(num_ranks)}
        results, errors = dict[int, Any](), list[str]()
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    failed, value = pipe.recv()
                except (EOFError, ConnectionError):
                    failed, value = True, f"died, exit code {self._exit_code(rank)}"
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    errors.append(f"rank {rank} of {num_ranks}: {value}")
                else:
                    results[rank] = value
        if waiting:
            late = sorted(waiting.values())
            errors.append(f"not done when time was up: ranks {late} of {num_ranks}")
            errors += [f"rank {rank} was at:\n{self._stack(rank)}" for rank in late]
        return results, errors

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name, f"rank-{rank}")

    def _stack(self, rank: int) -> str:
        """What the threads of a rank are doing, the latest call of each first."""
        process = self._processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.5)  # it is written by a C handler, whatever the rank waits for
        return self._stack_file(rank).read_text(encoding="utf-8") or "nothing was written"

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(1.0)
        code: int | None = self._processes[rank].exitcode
        return code


def run_ranks(num_ranks: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`Ranks.run` in processes that end with the job."""
    with Ranks(num_ranks) as ranks:
        return ranks.run(job, num_ranks, *arguments)


def _rank_loop(pipe: Connection, stack_file: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(stack_file, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR2, file)  # lptune takes no SIGUSR2
        _serve(pipe)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            job, rank, num_ranks, port, arguments = pipe.recv()
        except EOFError:
            return
        os.environ |= rank_environment(rank, num_ranks, port)
        try:
            answer = (False, job(rank, num_ranks, *arguments))
        except Exception:  # any; it is the parent that judges
            answer = (True, traceback.format_exc())
        pipe.send(answer)
