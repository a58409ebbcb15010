"""The command in an error installs the package that was missed, into the Python that missed it."""

import importlib.metadata
import shlex
import sys

import pytest
from packaging.requirements import Requirement

from lptune.base.errors import how_to_install

OPTIONAL = ("data", "datasets", "eval", "tensorboard", "wandb", "trackio", "triton")


@pytest.mark.parametrize("extra", OPTIONAL)
def test_the_command_names_this_python_and_the_packages_of_the_extra(extra: str) -> None:
    words = shlex.split(how_to_install(extra).removeprefix("run: "))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    listed = [Requirement(each) for each in importlib.metadata.requires("lptune") or []]
    of_extra = [each for each in listed if each.marker and f'extra == "{extra}"' in str(each.marker)]
    wanted = {(each.name, str(each.specifier)) for each in of_extra}
    found = {(each.name, str(each.specifier)) for each in map(Requirement, words[4:])}
    assert found == wanted
    assert found


def test_an_environment_without_pip_gets_the_command_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(()))
    assert how_to_install("data").startswith(f"run: uv pip install --python {sys.executable} 'pyarrow>=")


def test_without_metadata_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert (
        how_to_install("data")
        == "install the packages that lptune's pyproject.toml lists as the extra 'data'"
    )
