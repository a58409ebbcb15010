"""lptune without the folder lptune/tools: it trains, saves and exports, and names no tool."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import cold
from tests.helpers.cold import Finished
from tests.helpers.commands import COMMANDS
from tests.helpers.tiny_recipe import make_checkpoint, write_config
from tests.recipes.conftest import losses

TOOLS = {"advise", "diff", "doctor", "migrate", "report", "sweep"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree without the tools."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("lptune", "recipes", "configs"):
        unwanted = shutil.ignore_patterns("__pycache__", "tools")
        shutil.copytree(cold.ROOT / name, folder / name, ignore=unwanted)
    return folder


def lptune(copy: Path, *arguments: str, folder: Path) -> Finished:
    return cold.run(*cold.LPTUNE, *arguments, folder=folder, PYTHONPATH=str(copy))


def test_a_run_is_trained_saved_and_exported(copy: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", make_checkpoint(tmp_path / "tiny"), tmp_path / "run")
    run = tmp_path / "run"
    done = lptune(copy, "run", "full_finetune", "--config", str(config), "num_steps=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"\nfiles      {run}: export/, metrics.jsonl\nnext\n  lptune run generate" in done.stdout
    assert "report" not in done.stdout + done.stderr
    assert len(losses(run)) == 2
    assert (run / "export/model.safetensors").is_file()
    assert not (run / "report.html").exists()


def test_only_the_commands_of_the_core_are_there(copy: Path, tmp_path: Path) -> None:
    listed = lptune(copy, "--help", folder=tmp_path).stdout.partition("\nCommands:\n")[2].partition("\n\n")[0]
    names = {line.split()[0] for line in listed.splitlines()}
    assert names == COMMANDS.keys() - TOOLS
    done = lptune(copy, "report", "run", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such command 'report'")
