"""The command line, cold and in this process. Most tests fork it: tests/helpers/warm.py."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lptune.cli.main import main
from lptune.models import PRESETS
from tests.helpers import cold
from tests.helpers.cold import Finished

Command = Callable[..., tuple[int, str, str]]
Lptune = Callable[..., Finished]


def write_model(folder: Path) -> Path:
    """A folder in which only torch finds a fault: llama3_2/tiny with a single weight."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["llama3_2"]["tiny"]))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def lptune(tmp_path: Path) -> Lptune:
    """`lptune("ls")` runs the command in an empty folder and returns the finished process."""

    def call(*arguments: str, timeout: float = 120, cwd: Path = tmp_path, **environment: str) -> Finished:
        return cold.run(*cold.LPTUNE, *arguments, folder=cwd, timeout_s=timeout, **environment)

    return call


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`command("ls")` runs the command in this process, in an empty folder: (exit code, stdout, stderr)."""
    for name in set(os.environ) - set(cold.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # what a command would set would outlive it here
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capfd.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    return call
