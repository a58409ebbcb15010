"""Paths that cannot be printed or opened are refused at the start, by one rule for configs and commands."""

import os
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.config import check_path
from tests.cli.conftest import Command

CONFIG = "model: {path: a}\ndata: {source: builtin}\n"
ODD = {"a byte that is no UTF-8": os.fsdecode(b"odd\xff"), "a control character": "odd\nrow\x1b[31m"}
LAYOUTS: list[tuple[str, list[str]]] = [
    ("output_dir", ["validate", "job.yaml", "output_dir={}"]),
    ("model.path", ["validate", "job.yaml", "model.path={}"]),
    ("resume", ["run", "full_finetune", "--config", "job.yaml", "resume={}"]),
    ("config", ["run", "full_finetune", "--config", "{}.yaml"]),
    ("DEST", ["export", "run", "{}"]),
    ("CHECKPOINT", ["export", "{}", "new"]),
    ("--base", ["export", "run", "new", "--base", "{}"]),
    ("DEST", ["new-checkpoint", "llama3_2/tiny", "{}"]),
    ("--text", ["new-checkpoint", "llama3_2/tiny", "new", "--text", "{}"]),
    ("PATH", ["verify", "{}"]),
    ("--output-dir", ["download", "owner/name", "--output-dir", "{}"]),
    ("DEST", ["cp", "full_finetune", "{}"]),
]


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize(("key", "arguments"), LAYOUTS, ids=lambda value: str(value)[:20])
def test_a_path_that_is_no_printable_text_is_one_line_at_the_start(
    command: Command, tmp_path: Path, key: str, arguments: list[str], what: str
) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    code, stdout, stderr = command(*[argument.replace("{}", ODD[what]) for argument in arguments])
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert f"{key}: " in stderr
    assert f"its path holds {what}; rename it, or choose another" in stderr
    assert "\x1b" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    "value", ["x" * 300, "x/" * 2030, "y/../" * 900 + "x/" * 1900], ids=["name", "path", "dots"]
)
@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        *LAYOUTS,
        ("A", ["diff", "{}", "job.yaml"]),
        ("B", ["diff", "job.yaml", "{}"]),
        ("RUN...", ["report", "{}"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_path_that_is_too_long_is_one_line_at_the_start(
    command: Command, tmp_path: Path, key: str, arguments: list[str], value: str
) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    code, stdout, stderr = command(*[argument.replace("{}", value) for argument in arguments])
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert f"{key}: " in stderr
    assert "is not a path: " in stderr
    assert "bytes" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_path_in_a_list_is_refused_with_its_entry(command: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    code, stdout, stderr = command("validate", "job.yaml", r'data.source=[builtin, "odd\nrow\e[31m"]')
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert "data.source[1]: " in stderr
    assert "its path holds a control character; rename it, or choose another" in stderr
    code, stdout, stderr = command("validate", "job.yaml", os.fsdecode(b'data.source=[builtin, "odd\xff"]'))
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert "holds a byte that is no UTF-8; write it as text" in stderr


def test_the_folders_above_a_path_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / ODD["a byte that is no UTF-8"]
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(UserError, match=r"output_dir: .*a byte that is no UTF-8"):
        check_path("output_dir", "run")


@pytest.mark.parametrize("name", ["Läufe", "模型", "ideographic\u3000space", "a b", "👍"])
def test_letters_of_any_script_are_a_path(name: str) -> None:
    check_path("output_dir", name)
