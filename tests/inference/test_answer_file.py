"""The file of answers and its settings: other people's files beside it, a full disk, and damaged lines."""

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.data import Prompt
from lptune.data.sources import Row
from lptune.distributed import World
from lptune.inference import AnswerFile
from lptune.inference.rounds import Finished

SETTINGS = {"seed": 0, "versions": {"lptune": "x"}}


def prompts(num: int, **more: Any) -> list[Prompt]:
    return [Prompt(Row(f"rows line {i}", {"id": i, **more}), [1], False) for i in range(1, num + 1)]


def answer(path: Path, rows: Sequence[Prompt], world: World) -> int:
    """Answers the rows that have no answer; returns the number of rounds."""
    num_rounds = 0
    with AnswerFile(path, "generated", SETTINGS, world) as file:
        for batches in file.rounds(rows, 2):
            file.write(batches, [[Finished("a", "token", 1) for _ in batch] for batch in batches])
            num_rounds += 1
    return num_rounds


def test_a_link_beside_the_file_is_replaced_and_not_written_through(tmp_path: Path, world: World) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious", encoding="utf-8")
    (tmp_path / "a.settings.json").symlink_to("victim")
    assert answer(tmp_path / "a", prompts(3), world) == 2
    assert victim.read_text(encoding="utf-8") == "precious"
    assert answer(tmp_path / "a", prompts(3), world) == 0


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_pipe_or_a_folder_beside_the_file_is_one_line(
    tmp_path: Path, world: World, make: Any, is_begun: bool
) -> None:
    make(tmp_path / "a.settings.json")
    if is_begun:
        (tmp_path / "a").write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"settings\.json"):
        answer(tmp_path / "a", prompts(1), world)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed":' + "[" * 900 + "]" * 900 + "}", "[]", "\xff"])
def test_settings_or_answers_that_no_job_wrote_are_one_line(tmp_path: Path, world: World, text: str) -> None:
    path, settings = tmp_path / "a", tmp_path / "a.settings.json"
    answer(path, prompts(1), world)
    kept = settings.read_bytes()
    settings.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="does not say that it has answers of this job"):
        answer(path, prompts(1), world)
    settings.write_bytes(kept)
    path.write_text(f"{text}\n", encoding="latin-1")
    with pytest.raises(UserError, match="an answer is not that of rows line 1"):
        answer(path, prompts(1), world)
    assert path.read_text(encoding="latin-1") == f"{text}\n"


def test_a_full_disk_is_one_line_and_the_same_command_continues(tmp_path: Path, world: World) -> None:
    path, rows = tmp_path / "a", prompts(6, pad="x" * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # one batch of two fits
    try:
        with pytest.raises(UserError, match="File too large; it keeps 2 answers"):
            answer(path, rows, world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer(path, rows, world) == 2
    whole = path.read_bytes()
    path.unlink()
    assert answer(path, rows, world) == 3
    assert path.read_bytes() == whole
