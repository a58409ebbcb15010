"""run.json and samples.jsonl: a run keeps its id, and a file that somebody broke is written anew."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune import distributed
from lptune.checkpoint.run_folder import write_launch, write_samples
from lptune.distributed import World


@pytest.fixture
def world() -> World:
    """One rank on a CPU; nothing is exchanged."""
    return distributed.World(0, 1, torch.device("cpu"), mesh=None)  # type: ignore[arg-type]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_keeps_its_id_and_lists_its_launches(tmp_path: Path, world: World) -> None:
    path = tmp_path / "run.json"
    write_launch(path, "abc", 0, 10, world)
    write_launch(path, "abc", 4, 20, world)
    found = _read(path)
    assert [(launch["step"], launch["num_steps"]) for launch in found["launches"]] == [(0, 10), (4, 20)]
    assert found["data_digest"] == "abc"
    assert len(found["id"]) == 8
    first = found["id"]
    write_launch(path, "abc", 8, 20, world)
    assert _read(path)["id"] == first
    write_launch(tmp_path / "other.json", "abc", 0, 10, world)
    assert _read(tmp_path / "other.json")["id"] != first


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3, "launches": {}}', "[" * 100_000])
def test_a_broken_file_is_written_anew(tmp_path: Path, world: World, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    write_launch(path, "abc", 0, 10, world)
    found = _read(path)
    assert len(found["launches"]) == 1
    assert isinstance(found["id"], str)


def test_samples_of_another_time_stay(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"

    def sample(when: str, answer: str) -> dict[str, object]:
        return {"step": 0, "when": when, "answer": answer}

    write_samples(path, [sample("before training", "a"), sample("before training", "b")])
    with path.open("a", encoding="utf-8") as file:
        file.write("no JSON\n[1]\n")
    write_samples(path, [sample("after training", "c")])
    write_samples(path, [sample("after training", "d\u2028e")])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["when"], row["answer"]) for row in rows] == [
        ("before training", "a"),
        ("before training", "b"),
        ("after training", "d\u2028e"),
    ]
