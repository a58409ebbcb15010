"""The built wheel, installed beside nothing of the source tree: recipes and configs travel with it."""

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import cold
from tests.helpers.cold import ROOT

SOURCES = ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "lptune", "recipes", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network from a copy of the sources."""
    pytest.importorskip("hatchling")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    done = cold.run("-m", "hatchling", "build", "-t", "wheel", "-d", str(out), folder=copy)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_recipe_and_config_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("recipes", "configs"):
        files = [path for path in (ROOT / kind).rglob("*") if path.suffix in (".py", ".yaml")]
        assert files
        assert {
            f"lptune/_bundled/{kind}/{path.relative_to(ROOT / kind).as_posix()}" for path in files
        } <= names
    data = [path for path in (ROOT / "lptune").rglob("*") if path.suffix in (".cpp", ".h", ".json")]
    assert {path.relative_to(ROOT).as_posix() for path in data} <= names
    assert {"quantize.cpp", "elements.h", "crossover.json"} <= {path.name for path in data}
    assert {name.split("/")[0] for name in names if not name.startswith("lptune-")} == {"lptune"}


def test_the_installed_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    cold.run("-m", "venv", "--without-pip", str(environment)).check_returncode()
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # The dependencies are those of this interpreter; a .pth file comes after what is installed here.
    outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "dependencies.pth").write_text("\n".join(outer) + "\n")
    zipfile.ZipFile(wheel).extractall(packages)
    variables = cold.environment()
    del variables["PYTHONPATH"]

    def lptune(*arguments: str) -> str:
        done = subprocess.run(
            [str(environment / "bin" / "python"), "-m", "lptune.cli.main", *arguments],
            cwd=empty,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [str(environment / "bin" / "python"), "-c", "import lptune; print(lptune.__file__)"],
        cwd=empty,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(packages))
    listed = lptune("ls").split()
    assert {"full_finetune", "llama3_2/1b"} <= set(listed)
    assert lptune("cat", "llama3_2/1b") == (ROOT / "configs" / "llama3_2" / "1b.yaml").read_text()
    assert lptune("cp", "full_finetune", "mine.py") == "copied full_finetune to mine.py\n"
    assert (empty / "mine.py").read_text() == (ROOT / "recipes" / "full_finetune.py").read_text()
    lptune("cp", "llama3_2/1b", "mine.yaml")
    assert "ok: mine.yaml fits mine.py" in lptune(
        "validate", "mine.yaml", "--recipe", "mine.py", "data.source=rows.jsonl"
    )
    assert "ok:" in lptune("validate", "qwen3/8b", "data.source=rows.jsonl")
    assert "--nproc-per-node" in lptune("run", "--help")
    (empty / "toy.py").write_text(
        "from lptune.config import FinetuneConfig\n\n"
        "def main(cfg: FinetuneConfig) -> None:\n    print(cfg.seed)\n"
    )
    told = lptune("run", "toy.py", "--config", "llama3_2/1b", "data.source=builtin", "seed=5")
    assert told.startswith("recipe     toy.py, config llama3_2/1b\n")
    assert told.endswith("\n5\n")
