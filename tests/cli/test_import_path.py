"""Where a run's modules come from: the same on one rank and on two, by either module name of the command."""

import os
import sys
from pathlib import Path

import pytest

from lptune.launch import launcher
from tests.helpers import cold

RECIPE = """
import os, sys
import beside_the_recipe, click, copy
from lptune.config import FinetuneConfig
from lptune.launch import preemption

def main(cfg: FinetuneConfig) -> None:
    print(beside_the_recipe.VALUE, preemption._listener is not None)
"""


@pytest.mark.parametrize(("module", "flags"), [("lptune", []), ("lptune.cli.main", ["--nproc-per-node=2"])])
def test_modules_beside_the_recipe_are_found_and_hide_no_other(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    here, beside = tmp_path / "here", tmp_path / "recipes"
    here.mkdir()
    beside.mkdir()
    for name in ("click", "copy"):
        (beside / f"{name}.py").write_text("print('planted')\n", encoding="utf-8")
    (beside / "beside_the_recipe.py").write_text("VALUE = 7\n", encoding="utf-8")
    (beside / "mine.py").write_text(RECIPE, encoding="utf-8")
    arguments = ("run", *flags, "../recipes/mine.py", "--config", "quickstart")
    done = cold.run("-m", module, *arguments, folder=here)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "7 True"), done.stderr
    assert "planted" not in done.stdout


def test_ranks_find_an_lptune_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(launcher.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "/others")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    launcher.let_ranks_find_lptune()
    assert os.environ["PYTHONPATH"] == f"{root}{os.pathsep}/others"
