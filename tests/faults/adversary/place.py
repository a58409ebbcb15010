"""Where a case happens: a folder with a model, rows, a config and a victim; and how commands run there."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import yaml

from tests.faults.adversary import phases
from tests.faults.adversary.child import NO_READER, Streams, call
from tests.helpers import cold, fork_server
from tests.helpers.cold import ROOT

SECRET = "s3cr3t-5b1f9e"
"""Content of the victim, and value of the variable TOP_SECRET."""
TIMEOUT_S = 60.0
NUM_STEPS = 2


class Finished(NamedTuple):
    """A command that has ended. stdout and stderr are None where they did not go to a file."""

    arguments: list[str]
    code: int | None
    """None: killed after TIMEOUT_S."""
    stdout: bytes | None
    stderr: bytes | None
    num_left: int
    """Processes that it started and that had to be killed."""


Meanwhile = Callable[["Place", int], object]
"""Called with the place and the id of the process, while that runs."""


class Place:
    """Folder of a case; the command's current directory is `folder`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder, self.tmp, self.cache = root / "work", root / "tmp", root / "cache"
        self.model, self.rows, self.config = (
            self.folder / name for name in ("model", "rows.jsonl", "job.yaml")
        )
        self.victim, self.run = self.folder / "victim", self.folder / "run"
        self.finished = root.parent / "finished"
        self.kernels = root.parent / "kernels"
        self._num_commands = 0

    def make(self, model: Path | None) -> None:
        """Empties the folder and fills it; without a model that one is still to be made."""
        shutil.rmtree(self.root, ignore_errors=True)
        for path in (self.folder, self.tmp, self.cache, self.root / "home", self.root / "said"):
            path.mkdir(parents=True)
        (self.victim / "folder" / "step-00000001").mkdir(parents=True)
        for name in ("file", "file.jsonl", "file.jinja", "folder/file", "folder/step-00000001/state.json"):
            (self.victim / name).write_text(SECRET + "\n", encoding="utf-8")
        if model is not None:
            shutil.copytree(model, self.model)
        row = '{"prompt": "What is 2 + 2?", "response": "It is 4."}\n'
        self.rows.write_text(row * 8, encoding="utf-8")
        self.write_config()

    def write_config(self, path: Path | None = None, **changed: object) -> Path:
        """job.yaml: a run of two steps; `changed` replaces whole sections or keys."""
        values: dict[str, object] = {
            "model": {"path": "model"},
            "data": {"source": "rows.jsonl", "seq_len": 64},
            "compile": "none",
            "activation_checkpointing": "none",
            "compute_dtype": "float32",
            "device": "cpu",
            "global_batch_size": 2,
            "micro_batch_size": 2,
            "num_steps": NUM_STEPS,
            "eval_every_steps": 0,
            "output_dir": "run",
        }
        path = path or self.config
        path.write_text(yaml.safe_dump(values | changed, allow_unicode=True), encoding="utf-8")
        return path

    def a_finished_run(self) -> Path:
        """`run`, as it is after its two steps; goes on with num_steps=3."""
        return Path(shutil.copytree(self.finished, self.run))

    def job(self, *overrides: str, recipe: str = "full_finetune") -> list[str]:
        """`lptune run`."""
        return ["run", recipe, "--config", "job.yaml", *overrides]

    def lptune(
        self,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        streams: Streams | None = None,
        meanwhile: Meanwhile | None = None,
        *,
        is_cold: bool = False,
    ) -> Finished:
        """Runs it to its end. is_cold: in a new interpreter, as a user does."""
        self._num_commands += 1
        out, err = (str(self.root / "said" / f"{name}-{self._num_commands}") for name in ("out", "err"))
        streams = streams or Streams(os.devnull, out, err)
        streams = streams._replace(
            stdout=out if streams.stdout == os.devnull else streams.stdout,
            stderr=err if streams.stderr == os.devnull else streams.stderr,
        )
        variables = cold.environment() | self._environment() | dict(environment or {})
        launch = _Cold if is_cold else _Warm
        process = launch(arguments, str(self.folder), variables, streams)
        if meanwhile is not None:
            meanwhile(self, process.pid)
        code = process.wait()
        left = _left_of(process.pid, str(self.tmp))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        said = [Path(path).read_bytes() if os.path.isfile(path) else None for path in (out, err)]
        return Finished(arguments, code, *said, len(left))

    def _environment(self) -> dict[str, str]:
        return {
            "TMPDIR": str(self.tmp),
            "XDG_CACHE_HOME": str(self.cache),
            "HOME": str(self.root / "home"),
            "TOP_SECRET": SECRET,
            "HF_HUB_OFFLINE": "1",
            phases.FOLDER: str(self.root / "said"),
        }


class _Warm:
    def __init__(self, *arguments: object) -> None:
        self._process = fork_server.process(call, *arguments)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self) -> int | None:
        """Exit code, negative for a signal; None where it did not end."""
        self._process.join(TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            return None
        return self._process.exitcode


class _Cold:
    _REDIRECTED: ClassVar = {NO_READER: "{}> >(exec true)"}

    def __init__(
        self, arguments: list[str], folder: str, environment: dict[str, str], streams: Streams
    ) -> None:
        to = " ".join(
            self._REDIRECTED.get(stream, f"{{}}>>'{stream}'").format(number)
            for number, stream in ((1, streams.stdout), (2, streams.stderr))
        )
        line = f'exec "$@" {to}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "-", *cold.command("-P", "-m", "lptune", *arguments)],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def wait(self) -> int | None:
        try:
            return self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


def _left_of(session: int, mark: str) -> list[int]:
    """Processes of a session, or with `mark` in their environment, that do not end within some seconds."""
    deadline = time.monotonic() + 5
    while left := [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_of(pid, session, mark)
    ]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _is_of(pid: int, session: int, mark: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
        if state in ("Z", "X"):
            return False
        return int(its_session) == session or mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError):
        return False


class Inputs:
    """What all cases of a session begin with, made once in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"
        place = Place(root / "case")
        place.make(None)
        self._succeed(place, ["new-checkpoint", "llama3_2/tiny", "model"])
        self._succeed(place, place.job())
        place.run.rename(place.finished)
        place.model.rename(self.model)

    def _succeed(self, place: Place, arguments: list[str]) -> None:
        done = place.lptune(arguments)
        assert done.code == 0, (done.stderr or b"").decode()

    def place(self) -> Place:
        """A fresh one, always at the same path: the finished run names its model by it."""
        place = Place(self.root / "case")
        place.make(self.model)
        return place
