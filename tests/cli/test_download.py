"""`lptune download` against a hub on the loopback address: what is fetched, what is pinned, what is refused."""

# ruff: noqa: E501  (messages are compared whole)

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.cli.conftest import Command, Lptune

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ bos_token }}",
    "merges.txt": b"a b",
    "vocab.txt": b"a",
    "README.md": b"# a model",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"import os",
    "training_args.pt": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
}
WANTED = {
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "vocab.txt",
}  # fmt: skip
REPOSITORIES = {"owner/good": FILES, "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    requested: list[str]
    odd: Callable[["Hub", str], bool] = lambda hub, path: False
    """Answers a request itself and returns True, or leaves it."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        type(self).requested.append(path)
        if Hub.odd(self, path):
            return None
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            revision = parts[5] if len(parts) > 5 else "main"
            if name == "owner/gated":
                return self.refuse(403, "GatedRepo")
            if name not in REPOSITORIES:
                return self.refuse(404, "RepoNotFound")
            if revision not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            files = REPOSITORIES[name]
            if parts[4:5] == ["tree"]:
                tree = [
                    {"type": "file", "oid": "a" * 40, "size": len(data), "path": file}
                    for file, data in files.items()
                ]
                return self.send(json.dumps(tree).encode())
            siblings = [{"rfilename": file} for file in files]
            return self.send(
                json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}).encode()
            )
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[2:4] == ["resolve", COMMIT] and file in REPOSITORIES.get(name, {}):
            return self.send(REPOSITORIES[name][file])
        return self.refuse(404, "EntryNotFound")

    def send(self, content: bytes, *, etag: str = "", commit: str = COMMIT) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag or format(hash(content) & 0xFFFFFFFF, "040x")}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this test."""
    monkeypatch.setattr(Hub, "requested", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(server, "handle_error", lambda request, address: None)  # a client has left
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(lptune: Lptune, tmp_path: Path, endpoint: str) -> Lptune:
    """`lptune` in an environment whose hub is that server."""
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return lambda *arguments, **more: lptune(*arguments, **(environment | more))


@pytest.fixture
def here(command: Command, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command`, in this process, for which huggingface_hub has read the environment long ago."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_home"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return command


def test_only_safetensors_json_and_tokenizer_files_are_fetched_and_the_commit_is_printed(
    hub: Lptune, tmp_path: Path
) -> None:
    done = hub("download", "owner/good")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "checkpoints" / "good"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert done.stdout.splitlines() == [
        "downloaded owner/good to checkpoints/good",
        f"pinned: lptune download owner/good --revision {COMMIT} --output-dir checkpoints/good",
    ]
    fetched = {path.partition(f"resolve/{COMMIT}/")[2] for path in Hub.requested if "/resolve/" in path}
    assert fetched == WANTED
    pinned = hub("download", "owner/good", "--revision", COMMIT, "--output-dir", "again")
    assert pinned.returncode == 0
    assert {path.name for path in (tmp_path / "again").iterdir() if path.is_file()} == WANTED


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["owner/pickled"], {}, "owner/pickled: holds no safetensors, only pytorch_model.bin, a pickle, which is never loaded; choose a repository or revision that does"),
        (["owner/none"], {}, "owner/none: is not on the hub, or private (set HF_TOKEN)"),
        (["owner/gated"], {}, "owner/gated: is gated; accept its terms on the hub, then set HF_TOKEN"),
        (["owner/good", "--revision", "v9"], {}, "owner/good: has no revision 'v9'"),
        (["not a repo"], {}, "not a repo: is no repository id; give OWNER/NAME, e.g. Qwen/Qwen3-0.6B"),
        (["owner/good"], {"HF_HUB_OFFLINE": "1"}, "owner/good: cannot be downloaded: HF_HUB_OFFLINE is set"),
        (["owner/good"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "owner/good: cannot be downloaded: "),
    ],
)  # fmt: skip
def test_what_cannot_be_downloaded_is_one_line_and_leaves_no_folder(
    hub: Lptune, tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = hub("download", *arguments, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "checkpoints").exists()


LIST, TREE, WEIGHTS = "api/models/owner/good/revision/main", f"/tree/{COMMIT}", "/model.safetensors"


def _body(content: bytes) -> Callable[[Hub], None]:
    return lambda hub: hub.send(content)


def _listed(**fields: object) -> Callable[[Hub], None]:
    siblings = [{"rfilename": "model.safetensors"}]
    return _body(json.dumps({"id": "owner/good", "sha": COMMIT, "siblings": siblings, **fields}).encode())


NO_HUB = "does not answer as a hub does"


@pytest.mark.parametrize(
    ("ending", "answer", "message"),
    [
        (LIST, _body(b"<html>please log in</html>"), NO_HUB),
        (LIST, _body(b""), NO_HUB),
        (LIST, _body(b'{"id": "owner/good", "sib'), NO_HUB),
        (LIST, _body(b"[1]"), NO_HUB),
        (LIST, _body(b"null"), NO_HUB),
        (LIST, _body(b"\xff\xfe\x00"), NO_HUB),
        (LIST, _body(100_000 * b"["), NO_HUB),
        (LIST, _listed(siblings=[1]), NO_HUB),
        (LIST, _listed(siblings=[{"rfilename": 5}]), "holds no safetensors"),
        (LIST, _listed(sha=None), "(ValueError: None is no commit)"),
        (LIST, _listed(sha="../../../outside"), "(ValueError: '../../../outside' is no commit)"),
        (LIST, lambda hub: hub.refuse(500, ""), "500 Internal Server Error"),
        (TREE, _body(b"<html>please log in</html>"), NO_HUB),
        (TREE, _body(b"{}"), "did not come from the hub as of 0123456789ab; download it again"),
        (TREE, _body(b"[5]"), NO_HUB),
        (WEIGHTS, lambda hub: hub.refuse(403, ""), "403 Forbidden"),
        (WEIGHTS, lambda hub: hub.send(b"weights", commit="f" * 40), "did not come from the hub as of"),
        (WEIGHTS, lambda hub: hub.send(b"weights", etag="c" * 64), "is not what the hub sent"),
    ],
)  # fmt: skip
def test_what_no_hub_answers_is_one_line_and_leaves_no_weights_that_a_run_would_take(
    here: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    answer: Callable[[Hub], None],
    message: str,
) -> None:
    def odd(hub: Hub, path: str) -> bool:
        is_asked = path.endswith(ending)
        if is_asked:
            answer(hub)
        return is_asked

    monkeypatch.setattr(Hub, "odd", odd)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert message in stderr
    folder = tmp_path / "checkpoints" / "good"
    assert ending != WEIGHTS or not (folder / "model.safetensors").exists() or "did not come" in stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoints", "hf_home"}  # nothing beside them


def test_an_older_download_is_not_taken_for_one_of_the_commit_that_was_asked_for(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("download", "owner/good")[0] == 0
    newer = "f" * 40

    def odd(hub: Hub, path: str) -> bool:
        if path == LIST:
            _listed(sha=newer)(hub)
        elif newer in path:  # huggingface_hub then takes the folder that is there
            hub.refuse(403, "")
        return path == LIST or newer in path

    monkeypatch.setattr(Hub, "odd", odd)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout) == (2, "")
    assert "model.safetensors: did not come from the hub as of ffffffffffff" in stderr


def test_a_hub_that_never_answers_is_given_up(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def odd(hub: Hub, path: str) -> bool:
        return over.wait(10)

    monkeypatch.setattr(Hub, "odd", odd)
    monkeypatch.setattr("lptune.cli.hub.WAIT_S", 0.2)
    code, stdout, stderr = here("download", "owner/good")
    over.set()
    assert (code, stdout, stderr) == (2, "", "error: owner/good: cannot be downloaded: timed out\n")


def test_a_token_is_no_option(hub: Lptune) -> None:
    done = hub("download", "owner/good", "--token", "secret")
    assert done.returncode == 2
    assert "--token" in done.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--ignore-patterns", "only safetensors, JSON and tokenizer files are fetched"),
        ("--hf-token", "set HF_TOKEN"),
    ],
)
def test_an_option_of_torchtunes_download_is_answered_without_repeating_its_value(
    command: Command, option: str, said: str
) -> None:
    code, stdout, stderr = command("download", "owner/name", option, "s3cret")
    assert (code, stdout) == (2, "")
    assert said in stderr
    assert "s3cret" not in stderr
