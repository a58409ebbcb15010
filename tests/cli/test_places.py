"""Paths that commands are given: where a folder can be made, `~`, and what cannot be printed or opened."""

# ruff: noqa: E501  (messages are compared whole)

import os
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.config import check_path
from tests.cli.conftest import CONFIG, Command

TAKEN = "{dest}: exists and is not an empty folder; choose another DEST"
CASES = {
    ".": ".: a finished folder is renamed into place, so give DEST a name, as in my-model",
    "victim/..": "victim/..: a finished folder is renamed into place, so give DEST a name, as in victim/../my-model",
    "dangling": TAKEN,
    "to_empty": TAKEN,
    "victim": TAKEN,
    "dangling/new": "dangling: is a link, where a folder is needed",
    "victim/file/new": "victim/file: is a file, where a folder is needed",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of the user."""
    for name in ("victim", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "victim/file").write_text("precious")
    for name, target in {"dangling": "nothing", "to_empty": "empty"}.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


def test_a_dest_in_which_nothing_can_be_made_is_one_line_and_changes_nothing(
    command: Command, here: Path
) -> None:
    before = sorted(here.rglob("*"))
    for dest, text in CASES.items():
        message = f"error: {text.format(dest=dest)}\n"
        assert command("new-checkpoint", "llama3_2/tiny", dest) == (2, "", message)
    assert command("export", "run", "victim")[2] == f"error: {TAKEN.format(dest='victim')}\n"
    assert sorted(here.rglob("*")) == before


def test_the_home_is_meant_by_a_tilde_that_the_shell_did_not_expand(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    taken = f"error: {here}/victim: exists and is not an empty folder; choose another DEST\n"
    assert command("new-checkpoint", "llama3_2/tiny", "~/victim") == (2, "", taken)
    assert command("export", "run", "~/victim") == (2, "", taken)
    assert command("cp", "quickstart", "~/copy.yaml") == (0, f"copied quickstart to {here}/copy.yaml\n", "")
    assert f"{here}/victim: is not a checkpoint" in command("verify", "~/victim")[2]
    assert f"{here}/victim: is not empty" in command("download", "owner/name", "--output-dir", "~/victim")[2]
    assert command("export", "~/nothing", "new")[2].startswith(f"error: {here}/nothing: no such checkpoint")
    assert not (here / "~").exists()


ODD = {
    "its path holds a byte that is no UTF-8; rename it, or choose another": os.fsdecode(b"odd\xff"),
    "its path holds a control character; rename it, or choose another": "odd\nrow\x1b[31m",
}


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("output_dir", ["validate", "job.yaml", "output_dir={}"]),
        ("model.path", ["validate", "job.yaml", "model.path={}"]),
        ("resume", ["run", "full_finetune", "--config", "job.yaml", "resume={}"]),
        ("config", ["run", "full_finetune", "--config", "{}.yaml"]),
        ("DEST", ["export", "run", "{}"]),
        ("CHECKPOINT", ["export", "{}", "new"]),
        ("--base", ["export", "run", "new", "--base", "{}"]),
        ("DEST", ["new-checkpoint", "llama3_2/tiny", "{}"]),
        ("PATH", ["verify", "{}"]),
        ("--output-dir", ["download", "owner/name", "--output-dir", "{}"]),
        ("DEST", ["cp", "full_finetune", "{}"]),
    ],
)
def test_a_path_that_cannot_be_printed_or_opened_is_one_line_at_the_start(
    command: Command, tmp_path: Path, key: str, arguments: list[str]
) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    for said, value in ODD.items():
        code, stdout, stderr = command(*[argument.replace("{}", value) for argument in arguments])
        assert (code, stdout, stderr.count("\n"), "\x1b" in stderr) == (2, "", 1, False), stderr
        assert f"{key}: " in stderr
        assert said in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_path_in_a_list_is_refused_with_its_entry(command: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    stderr = command("validate", "job.yaml", r'data.source=[builtin, "odd\nrow\e[31m"]')[2]
    assert "data.source[1]: " in stderr
    assert "its path holds a control character; rename it, or choose another" in stderr
    stderr = command("validate", "job.yaml", os.fsdecode(b'data.source=[builtin, "odd\xff"]'))[2]
    assert "holds a byte that is no UTF-8; write it as text" in stderr


def test_the_folders_above_a_path_count_too_and_letters_of_any_script_are_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Läufe", "模型", "ideographic\u3000space", "a b", "👍"):
        check_path("output_dir", name)
    odd = tmp_path / os.fsdecode(b"odd\xff")
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(UserError, match=r"output_dir: .*a byte that is no UTF-8"):
        check_path("output_dir", "run")
