"""What must be one on all machines of a run, seen by ranks that plain torchrun would start."""

import os
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from lptune.checkpoint.hosts import check_shared
from lptune.checkpoint.state import RunState
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, OptimizerConfig, load_config
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_recipe import make_checkpoint, write_config, write_rows


def _line_of(call: Callable[[], object]) -> str:
    """The error of the call; empty without one."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def _open(rank: int, num_ranks: int, folder: str, other: str) -> str:
    keys = {
        "lr": {"optimizer": OptimizerConfig(lr=1e-3 + rank)},
        "resume": {"resume": "auto" if rank == 0 else "none"},
        "path": {"model": ModelConfig(path=f"local-{rank}")},
    }[other]
    cfg = FinetuneConfig(
        **{"model": ModelConfig(path="a"), "data": DataConfig(source="b"), "output_dir": folder, **keys}
    )
    with distributed.session("cpu") as world:

        def opened() -> None:
            with checkpoint.open_run(cfg, world):
                pass

        return _line_of(opened)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ("lr", "optimizer.lr: 0.001 on rank 0, 1.001 on rank 1"),
        ("resume", "resume: auto on rank 0, none on rank 1"),
        ("path", ""),
    ],
)
def test_a_config_that_differs_on_one_rank_is_the_same_line_on_all(
    tmp_path: Path, ranks: Ranks, other: str, line: str
) -> None:
    first, second = ranks.run(_open, 2, str(tmp_path / "run"), other)
    assert first == second
    assert first.startswith(line)
    assert bool(first) == bool(line)


def _share(rank: int, num_ranks: int, folders: list[str], ranks_here: int) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_here)
    with distributed.session("cpu") as world:
        return _line_of(lambda: check_shared("output_dir", Path(folders[rank]), world, patience_s=0.5))


def test_a_folder_that_one_machine_has_for_itself_is_found(tmp_path: Path, ranks: Ranks) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    Path(one).mkdir()
    assert ranks.run(_share, 2, [one, one], 1) == ["", ""]
    assert ranks.run(_share, 2, [one, two], 2) == ["", ""], "one machine has one disk"
    for folders in ([one, two], [two, one]):
        lines = ranks.run(_share, 2, folders, 1)
        assert lines[0].startswith("output_dir: what ")
        assert all("choose a folder in a file system that all machines share" in line for line in lines)
    assert not list(Path(one).iterdir()), "nothing is left"


def _same(rank: int, num_ranks: int, digests: list[str]) -> str:
    with distributed.session("cpu") as world:
        return _line_of(lambda: checkpoint.check_same("model.path", digests[rank], world))


def test_ranks_that_have_read_different_files_end_with_the_same_line(ranks: Ranks) -> None:
    assert ranks.run(_same, 2, ["a", "a"]) == ["", ""]
    first, second = ranks.run(_same, 2, ["a", "b"])
    assert first == second
    assert first.startswith("model.path: is not the same on all ranks")


def _fingerprint(rank: int, num_ranks: int, other: dict[str, Any]) -> str:
    state = RunState({"fingerprint": {"seed": 1, "data": "d" * 16} | (other if rank else {})})
    with distributed.session("cpu") as world:
        return _line_of(lambda: checkpoint.check_fingerprint(None, state, world))


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({}, ""),
        ({"seed": 2}, "seed: is not the same on all ranks"),
        ({"data": "e" * 16}, "data (a digest of the training rows, "),
    ],
)
def test_ranks_with_other_rows_or_another_seed_are_refused_on_all_of_them(
    ranks: Ranks, other: dict[str, Any], line: str
) -> None:
    first, second = ranks.run(_fingerprint, 2, other)
    assert first == second
    assert first.startswith(line)
    assert bool(first) == bool(line)


def _train(rank: int, num_ranks: int, folders: list[str], config: str) -> str:
    cfg = load_config(FinetuneConfig, Path(config), [])
    with chdir(folders[rank]):  # each host has a disk of its own
        return _line_of(lambda: load_main(catalog.recipes()["full_finetune"])(cfg))


def test_held_out_rows_that_differ_under_one_path_are_found_at_the_start(
    tmp_path: Path, ranks: Ranks
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, count in ((one, 30), (two, 31)):
        folder.mkdir()
        write_rows(folder / "held_out.jsonl", count)
    data = {"source": "builtin", "seq_len": 128, "max_rows": 60, "eval_source": "held_out.jsonl"}
    config = write_config(
        tmp_path / "c.yaml", make_checkpoint(tmp_path / "m"), tmp_path / "run", data=data, num_steps=1
    )
    first, second = ranks.run(_train, 2, [str(one), str(two)], str(config))
    assert first == second
    assert first.startswith("data.eval_source: is not the same on all ranks: ")
    assert not (tmp_path / "run").exists()
