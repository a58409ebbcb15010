"""The command line, cold and in this process. Most tests fork it: tests/helpers/warm.py."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
CONFIG = "model: {path: a}\ndata: {source: builtin}\n"
"""What a recipe that reads neither needs."""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="signals of parents and pidfds are Linux's")


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


@pytest.fixture
def toy(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """The arguments RECIPE --config CONFIG of the toy that is RECIPE in the test's module."""
    (tmp_path / "toy.py").write_text(request.module.RECIPE)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    return ["toy.py", "--config", "toy.yaml"]


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on the loopback device, which is silent of clients that leave."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def hub_environment(endpoint: str, folder: Path) -> dict[str, str]:
    """The environment in which a server is the hub."""
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf_home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
