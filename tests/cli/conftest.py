"""Two ways to run the command line: as a user does, in a subprocess, and (faster) in this process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lptune.cli.main import main

ROOT = Path(__file__).parents[2]
Command = Callable[..., tuple[int, str, str]]
Finished = subprocess.CompletedProcess[str]
Lptune = Callable[..., Finished]


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher or a developer may have left in it."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("LPTUNE_", "TORCHELASTIC_", "PET_", "HF_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        kept.pop(name, None)
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def lptune(tmp_path: Path) -> Lptune:
    """`lptune("ls")` runs the command in an empty folder and returns the finished process."""

    def call(*arguments: str, timeout: float = 120, cwd: Path = tmp_path, **environment: str) -> Finished:
        return subprocess.run(
            [sys.executable, "-m", "lptune.cli.main", *arguments],
            cwd=cwd,
            env=clean_environment() | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`command("ls")` runs the command in this process, in an empty folder: (exit code, stdout, stderr)."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # what a command would set would outlive it here
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capfd.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    return call
