"""Where the commands make folders: what DEST may be, and that `~` is the home however it is quoted."""

# ruff: noqa: E501  (messages are compared whole)

from pathlib import Path

import pytest

from lptune.cli import places
from tests.cli.conftest import Command

MAKE = {"export": ["run"], "new-checkpoint": ["llama3_2/tiny"]}
TAKEN = "{dest}: exists and is not an empty folder; choose another DEST"
AMONG = "{dest}: is among the checkpoints of a run, {here}/run/checkpoints; choose another {option}"
CASES = {
    ".": ".: a finished folder is renamed into place, so give DEST a name, as in my-model",
    "victim/..": "victim/..: a finished folder is renamed into place, so give DEST a name, as in victim/../my-model",
    "dangling": TAKEN,
    "to_empty": TAKEN,
    "loop": TAKEN,
    "victim": TAKEN,
    "nowhere/../victim": "nowhere: no such folder; make it, or write DEST without it",
    "nowhere/../new": "nowhere: no such folder; make it, or write DEST without it",
    "nowhere/../empty/../new": "nowhere: no such folder; make it, or write DEST without it",
    "dangling/new": "dangling: is a link, where a folder is needed",
    "victim/file/new": "victim/file: is a file, where a folder is needed",
    "run/checkpoints/step-00000009": AMONG,
    "run/checkpoints/new": AMONG,
    "to_run/checkpoints/step-00000004/new": AMONG,
    "~nobody_of_this_name/new": "DEST: ~nobody_of_this_name/new: there is no such user's home; write ./~nobody_of_this_name/new for a name that begins with ~",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of the user, with a run."""
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000004/manifest.json").write_text("{}")
    for name in ("victim", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "victim/file").write_text("precious")
    for name, target in {"dangling": "nothing", "to_empty": "empty", "loop": "loop", "to_run": "run"}.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


@pytest.mark.parametrize("made_by", MAKE)
@pytest.mark.parametrize("dest", CASES)
def test_a_dest_in_which_nothing_can_be_made_is_one_line_and_changes_nothing(
    command: Command, here: Path, made_by: str, dest: str
) -> None:
    before = sorted(here.rglob("*"))
    message = CASES[dest].format(dest=dest, here=here, option="DEST")
    assert command(made_by, *MAKE[made_by], dest) == (2, "", f"error: {message}\n")
    assert sorted(here.rglob("*")) == before


def test_a_download_is_not_put_among_the_checkpoints_of_a_run(command: Command, here: Path) -> None:
    for name in ("step-00000009", "model"):
        dest = f"run/checkpoints/{name}"
        message = f"error: {AMONG.format(dest=dest, here=here, option='--output-dir')}\n"
        assert command("download", "owner/name", "--output-dir", dest) == (2, "", message)


def test_a_folder_that_is_no_runs_is_not_taken_for_its_checkpoints(tmp_path: Path) -> None:
    places.check_outside_checkpoints(tmp_path / "checkpoints/step-00000001")


def test_the_home_is_meant_by_a_tilde_that_the_shell_did_not_expand(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    taken = f"error: {here}/victim: exists and is not an empty folder; choose another DEST\n"
    for made_by, arguments in MAKE.items():
        assert command(made_by, *arguments, "~/victim") == (2, "", taken)
    assert command("cp", "quickstart", "~/copy.yaml") == (0, f"copied quickstart to {here}/copy.yaml\n", "")
    assert f"{here}/victim: is not a checkpoint" in command("verify", "~/victim")[2]
    assert f"{here}/victim: is not empty" in command("download", "owner/name", "--output-dir", "~/victim")[2]
    assert command("export", "~/nothing", "new")[2].startswith(f"error: {here}/nothing: no such checkpoint")
    assert not (here / "~").exists()
