"""ranks.py: an error, a death and a hang of a rank are reported, and wedge nothing that follows."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from lptune import distributed
from tests.helpers.ranks import Ranks, RanksFailed


def _sum(rank: int, num_ranks: int, value: float) -> tuple[float, int]:
    with distributed.session("cpu") as world:
        return world.sum(value + rank), os.getpid()


def _raise_on_one(rank: int, num_ranks: int) -> None:
    with distributed.session("cpu"):
        if rank == 1:
            raise ValueError("planted")
        dist.all_reduce(torch.zeros(1))


def _die_on_one(rank: int, num_ranks: int) -> None:
    with distributed.session("cpu"):
        if rank == 1:
            os._exit(7)
        dist.all_reduce(torch.zeros(1))


def _hang(rank: int, num_ranks: int) -> None:
    time.sleep(60)


def test_a_job_takes_the_first_ranks_and_the_processes_stay(ranks: Ranks) -> None:
    both = ranks.run(_sum, 2, 1.0)
    (one,) = ranks.run(_sum, 1, 5.0)
    assert [total for total, _ in both] == [3.0, 3.0]
    assert one == (5.0, both[0][1])


@pytest.mark.parametrize(
    ("job", "message"),
    [(_raise_on_one, "rank 1 of 2: .*ValueError: planted"), (_die_on_one, "rank 1 of 2: died, exit code 7")],
)
def test_a_rank_that_fails_is_named_and_frees_the_other(job: object, message: str, ranks: Ranks) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=f"(?s){message}"):
        ranks.run(job, 2)  # type: ignore[arg-type]
    assert time.monotonic() - started < 30
    assert ranks.run(_sum, 2, 0.0)[0][0] == 1.0


def test_ranks_that_hang_are_ended_when_time_is_up_and_say_where_they_were(ranks: Ranks) -> None:
    ranks.run(_sum, 2, 0.0)  # imports this module, which may take longer than the second below
    with pytest.raises(RanksFailed, match=r"(?s)up: ranks \[0, 1\] of 2.*test_ranks.py.*in _hang"):
        ranks.run(_hang, 2, timeout_s=1.0)
    assert ranks.run(_sum, 2, 0.0)[0][0] == 1.0
