"""The sdist, the wheel that is built of it and what is installed: nothing is missing, no link is dead."""

import email
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lptune import __version__
from tests.helpers import cold
from tests.helpers.cold import ROOT

SOURCES = ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "lptune", "recipes", "configs")
"""What a wheel is built of; the Dockerfile copies no more."""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("sdist")
    done = cold.run("-m", "hatchling", "build", "-t", "sdist", "-d", str(out), folder=ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built of SOURCES of the sdist."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel_of_sdist")
    for name in SOURCES:
        (shutil.copytree if (sdist / name).is_dir() else shutil.copy)(sdist / name, sources / name)
    done = cold.run("-m", "hatchling", "build", "-t", "wheel", "-d", str(out), folder=sources)
    assert done.returncode == 0, done.stderr
    (archive,) = out.glob("*.whl")
    zipfile.ZipFile(archive).extractall(out)
    return out


def test_the_sdist_has_every_file_that_git_keeps(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    kept = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert len(kept) > 500
    assert kept - packed == set()
    untracked = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    assert packed - kept - set(untracked.stdout.split("\0")) == {"PKG-INFO"}


def test_the_wheel_of_the_sdist_has_the_files_of_the_sources(sdist: Path, wheel: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    bundled = {
        name.removeprefix("_bundled/") for name in files(wheel / "lptune") if name.startswith("_bundled/")
    }
    assert files(wheel / "lptune") - {f"_bundled/{name}" for name in bundled} == files(ROOT / "lptune")
    sources = {f"{kind}/{name}" for kind in ("recipes", "configs") for name in files(ROOT / kind)}
    assert bundled == sources
    assert {path.name for path in wheel.iterdir() if not path.name.startswith("lptune-")} == {"lptune"}


def test_the_readme_of_a_wheel_has_no_link_that_needs_a_clone(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    message = email.message_from_string(metadata.read_text(encoding="utf-8"))
    assert message["Description-Content-Type"] == "text/markdown"
    assert {"Documentation", "Source", "Issues"} <= {
        url.partition(",")[0] for url in message.get_all("Project-URL", [])
    }
    targets = re.findall(r"\]\(([^)]+)\)", message.get_payload())
    prefix = re.compile(rf"https://github\.com/lptune/lptune/(blob|tree)/v{re.escape(__version__)}/([^#]+)")
    ours = [found for target in targets if (found := prefix.match(target))]
    assert len(ours) > 15
    assert not [target for target in targets if not re.match(r"https://|#", target)]
    for found in ours:
        path = ROOT / found[2]
        assert path.is_dir() if found[1] == "tree" else path.is_file(), found[0]


def test_a_message_of_an_installed_wheel_names_an_address(wheel: Path) -> None:
    code = (
        "from lptune.base.errors import UserError as E; print(E('seq_len: see docs/resume.md (docs/a.md)'))"
    )
    page = f"https://github.com/lptune/lptune/blob/v{__version__}/docs"

    def said(folder: Path) -> str:
        done = cold.run("-c", code, folder=folder, PYTHONPATH=str(folder))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert said(wheel) == f"seq_len: see {page}/resume.md ({page}/a.md)"
    assert said(ROOT) == "seq_len: see docs/resume.md (docs/a.md)"
    helped = cold.run("-m", "lptune", "run", "--help", folder=wheel, PYTHONPATH=str(wheel))
    assert f"{page}/multi_node.md" in re.sub(r"\s+", "", helped.stdout)


def test_the_installed_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    cold.run("-m", "venv", "--without-pip", str(environment)).check_returncode()
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # The dependencies are those of this interpreter; a .pth file comes after what is installed here.
    outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "dependencies.pth").write_text("\n".join(outer) + "\n")
    shutil.copytree(wheel / "lptune", packages / "lptune")
    variables = cold.environment()
    del variables["PYTHONPATH"]

    def python(*arguments: str) -> str:
        command = [str(environment / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("-c", "import lptune; print(lptune.__file__)").startswith(str(packages))
    lptune = ("-m", "lptune.cli.main")
    assert python(*lptune, "cp", "full_finetune", "mine.py") == "copied full_finetune to mine.py\n"
    assert (empty / "mine.py").read_text() == (ROOT / "recipes" / "full_finetune.py").read_text()
    validated = python(*lptune, "validate", "mine.py", "--config", "llama3_2/1b", "data.source=rows.jsonl")
    assert validated.startswith(f"ok: {packages}/lptune/_bundled/configs/llama3_2/1b.yaml fits mine.py")
    (empty / "toy.py").write_text(
        "from lptune.config import FinetuneConfig\n\n"
        "def main(cfg: FinetuneConfig) -> None:\n    print(cfg.seed)\n"
    )
    told = python(*lptune, "run", "toy.py", "--config", "llama3_2/1b", "data.source=builtin", "seed=5")
    assert told.startswith("recipe     toy.py, config llama3_2/1b\n")
    assert told.endswith("\n5\n")
