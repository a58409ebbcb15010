"""Work that the first rank of a machine does for all: the others come after it, and its errors reach them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune import distributed
from lptune.base.errors import UserError
from tests.helpers.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def _in_turn(rank: int, num_ranks: int, folder: str) -> list[str]:
    with distributed.session("cpu") as world, distributed.machine_first(world):
        found = sorted(os.listdir(folder))
        Path(folder, str(rank)).touch()
        return found


def _refused(rank: int, num_ranks: int) -> tuple[str, bool]:
    entered = False
    with distributed.session("cpu") as world:
        try:
            with distributed.machine_first(world):
                entered = True
                if rank == 0:
                    raise UserError("rows.jsonl line 7: not valid JSON")
        except UserError as error:
            return str(error), entered
    return "", entered


def test_the_first_rank_of_a_machine_goes_ahead(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_in_turn, 2, str(tmp_path)) == [[], ["0"]]


def test_its_error_reaches_the_others_in_place_of_their_turn(ranks: Ranks) -> None:
    line = "rows.jsonl line 7: not valid JSON"
    assert ranks.run(_refused, 2) == [(line, True), (line, False)]
    assert ranks.run(_refused, 1) == [(line, True)]
